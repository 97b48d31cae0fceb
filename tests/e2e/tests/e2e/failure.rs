//! What goes wrong: a clear error that names the cause, nothing left behind, other pods untouched.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{Capability, ContainerState, KeyValue, PodSandbox};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::case::{Case, idle, privileged, security, shell};

crate::cases![
    Any: entrypoint_that_is_not_there, endless_environment, image_that_is_not_there,
    working_directory_that_is_a_file, truncated_image;
    Vm: unknown_capability, start_given_up_half_way;
    VmAlone: vmm_killed, guest_that_panics, guest_that_stands_still
];

/// Checks that the pod still works after the failure.
async fn still_works(pod: &sandboxer_e2e::case::Pod) -> Result<()> {
    let output = pod.output("echo works").await?;
    ensure!(output == "works", "{output}");
    Ok(())
}

async fn entrypoint_that_is_not_there(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell("c", "");
    config.command = vec!["/bin/not-there".into()];
    let container = pod.create(config).await?;
    let error = case.cri.start(&container.id).await.err().context("was started")?;
    ensure!(error.message().contains("/bin/not-there"), "the error does not name the program: {error}");
    let status = container.status().await?;
    ensure!(status.state() == ContainerState::ContainerExited && status.exit_code != 0, "{status:?}");
    case.cri.remove(&container.id).await?;
    still_works(&pod).await
}

/// runc only warns. An unsupported request should be an error.
async fn unknown_capability(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell("c", "true");
    security(&mut config).capabilities =
        Some(Capability { add_capabilities: vec!["FLY".into()], ..Default::default() });
    let error = pod.start(config).await.err().context("was started")?;
    ensure!(error.message().contains("CAP_FLY"), "the error does not name the capability: {error}");
    still_works(&pod).await
}

/// The kernel takes at most 6 MB of arguments and environment for an exec, containerd 16 MB for a message.
async fn endless_environment(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    for megabytes in [7, 10] {
        let mut config = shell(&format!("c{megabytes}"), "true");
        config.envs = (0..megabytes * 10)
            .map(|n| KeyValue { key: format!("BIG{n}"), value: "x".repeat(100_000) })
            .collect();
        // Some runtimes learn of it only when the start has been answered.
        let refused = match pod.run(config).await {
            Err(error) => format!("{error:#}").to_lowercase(),
            Ok(ended) => {
                ensure!(ended.status.exit_code != 0, "{megabytes} MB were taken: {:?}", ended.status);
                "too long".to_owned()
            }
        };
        let clear = ["too long", "too large", "too big", "larger than", "smaller"];
        ensure!(clear.iter().any(|words| refused.contains(words)), "{megabytes} MB: {refused}");
    }
    still_works(&pod).await
}

async fn image_that_is_not_there(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell("c", "true");
    config.image.get_or_insert_default().image = "example.test/no/such:image".into();
    let error = pod.create(config).await.err().context("was created")?;
    ensure!(error.message().contains("example.test/no/such:image"), "{error}");
    still_works(&pod).await
}

async fn working_directory_that_is_a_file(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let mut config = shell("c", "true");
    config.working_dir = "/etc/passwd".into();
    let refused = match pod.create(config).await {
        Err(error) => error,
        Ok(container) => case.cri.start(&container.id).await.err().context("was started")?,
    };
    let named = ["/etc/passwd", "not a directory", "ENOTDIR"];
    ensure!(named.iter().any(|words| refused.message().contains(words)), "{refused}");
    still_works(&pod).await
}

/// An archive whose layer ends in the middle.
async fn truncated_image(case: Case) -> Result<()> {
    let archive = tempfile::NamedTempFile::new()?;
    let whole = std::fs::read(case.stack.dir().join("images/busybox.tar"))?;
    std::fs::write(archive.path(), whole.get(..whole.len() / 2).context("half of the image")?)?;
    let mut command = case.stack.command("ctr");
    command.args(["images", "import", "--base-name", "example.test/half"]).arg(archive.path());
    let output = tokio::task::spawn_blocking(move || command.output()).await??;
    ensure!(!output.status.success(), "half an image was imported");
    let pod = case.pod().await?;
    still_works(&pod).await
}

/// The client hangs up while the pod starts: containerd takes it back, and so must we.
async fn start_given_up_half_way(case: Case) -> Result<()> {
    // CNI's bridge is there when the first start is given up: its plugin cannot complete half a bridge.
    case.pod().await?;
    for millis in [30, 150, 400, 900] {
        let config = case.pod_config();
        let run = case.cri.run_pod(&config, case.handler);
        if tokio::time::timeout(Duration::from_millis(millis), run).await.is_ok() {
            continue;
        }
        // The name is free again once it was taken back.
        let name = config.metadata.clone().unwrap_or_default().name;
        let pod =
            sandboxer_e2e::eventually("name of the pod given up", sandboxer_e2e::case::PATIENCE, || async {
                match case.cri.run_pod(&config, case.handler).await {
                    Ok(id) => Ok(Some(id)),
                    // The start may have completed although nobody waited for it: then this is its pod.
                    Err(error) if error.message().contains("reserved") => {
                        let its = |pod: &PodSandbox| {
                            pod.metadata.as_ref().is_some_and(|metadata| metadata.name == name)
                        };
                        Ok(case.pods().await?.into_iter().find(its).map(|pod| pod.id))
                    }
                    Err(error) => {
                        Err(anyhow::Error::from(error).context(format!("after {millis} ms, {name}")))
                    }
                }
            })
            .await?;
        case.cri.stop_pod(&pod).await?;
        case.cri.remove_pod(&pod).await?;
    }
    Ok(())
}

/// The statistics are the last ones and come in time, and it goes on where it was.
async fn guest_that_stands_still(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    case.cri.stats(&container.id).await?;
    let vmms = case.stack.vmms()?;
    vmms.iter().try_for_each(|vmm| kill(*vmm, Signal::SIGSTOP))?;
    let begin = Instant::now();
    let mut result = Ok(());
    for _ in 0..5 {
        result = result.and(case.cri.stats(&container.id).await.map(drop));
    }
    let took = begin.elapsed();
    vmms.iter().try_for_each(|vmm| kill(*vmm, Signal::SIGCONT))?;
    result?;
    // Five times the agent's own limit without.
    ensure!(took < Duration::from_secs(10), "statistics took {took:?}");
    ensure!(container.sh("echo here").await? == "here");
    still_works(&pod).await
}

async fn vmm_killed(case: Case) -> Result<()> {
    let other = case.pod().await?;
    let known = case.stack.vmms()?;
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let victim = case.stack.vmms()?.into_iter().find(|pid| !known.contains(pid)).context("the pod's VMM")?;
    kill(victim, Signal::SIGKILL)?;

    pod.not_ready().await?;
    let status = container.ended().await?;
    ensure!(status.exit_code != 0, "{status:?}");
    // CRI has no field for it, so the reason is the last line of the container's error stream.
    let logs = container.logs()?;
    let named = ["VMM", "killed by signal 9", "last lines"];
    ensure!(named.iter().all(|words| logs.stderr.contains(words)), "no reason in the log: {logs:?}");
    case.cri.stop_pod(&pod.id).await?;
    case.cri.remove_pod(&pod.id).await?;
    still_works(&other).await
}

async fn guest_that_panics(case: Case) -> Result<()> {
    let pod = case.pod_with(privileged).await?;
    let mut config = idle("c");
    security(&mut config).privileged = true;
    let container = pod.start(config).await?;
    // The exec ends with its kernel.
    let panic = case.cri.exec_sync(
        &container.id,
        &["sh", "-c", "echo 2 >/proc/sys/vm/panic_on_oom && tail /dev/zero"],
        Some(Duration::from_secs(20)),
    );
    ensure!(!panic.await.is_ok_and(|answer| answer.exit_code == 0), "the guest went on after a panic");
    pod.not_ready().await?;
    let logs = container.logs()?;
    ensure!(logs.stderr.contains("Kernel panic"), "not told to have panicked: {logs:?}");
    container.ended().await?;
    case.cri.stop_pod(&pod.id).await?;
    Ok(case.cri.remove_pod(&pod.id).await?)
}
