//! Worker and front may be killed at any moment without visible effects.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use sandboxer_e2e::bystander::Bystander;
use sandboxer_e2e::case::{Case, PATIENCE, idle, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::stack::Victim;
use sandboxer_e2e::stream::Session;

crate::cases![
    VmAlone: killed_again_and_again, killed_during_execs, killed_while_a_container_ends, killed_during_a_session,
    killed_with_containerd, replaced, killed_while_containers_are_made, stopped,
    killed_while_a_vmm_stands_still
];

/// So often worker, front or both are killed in each case; more by SANDBOXER_E2E_KILLS.
fn kills() -> usize {
    let configured = std::env::var("SANDBOXER_E2E_KILLS").ok().and_then(|kills| kills.parse().ok());
    configured.unwrap_or(4)
}

/// Waits for a moment that differs from call to call: when a kill hits is the point.
async fn some_moment() {
    let millis = 5 + rand::random::<u64>() % 900;
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

async fn killed_again_and_again(case: Case) -> Result<()> {
    let Bystander { pod, container } = Bystander::start(&case, 1000).await?;
    let (vmms, keeper) = (case.stack.vmms()?, case.stack.pid("sandboxer")?);
    for round in 0..kills() {
        some_moment().await;
        let killed = case.stack.kill(Victim::in_turn(round))?;
        ensure!(container.sh("echo here").await? == "here");
        ensure!(pod.ready().await?, "the pod is not ready");
        ensure!(case.stack.worker()? != killed, "the worker was not killed");
    }
    ensure!(case.stack.pid("sandboxer")? == keeper && case.stack.vmms()? == vmms);
    ensure!(pod.output("echo new").await? == "new");
    Bystander { pod, container }.end(&case).await.map(drop)
}

async fn killed_during_execs(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    for round in 0..kills() {
        let execs = (0..4).map(|n: i32| {
            let container = container.clone();
            let cri = case.cri.clone();
            tokio::spawn(async move {
                let script = format!("seq 1 3000; sleep 0.{n}; seq 3001 6000; exit {}", n + 3);
                let answer = cri.exec_sync(&container.id, &["sh", "-c", &script], None).await?;
                ensure!(answer.exit_code == n + 3, "exit code {} for {n}", answer.exit_code);
                let expected: String = (1..=6000).map(|line| format!("{line}\n")).collect();
                ensure!(
                    answer.stdout == expected.as_bytes(),
                    "exec {n} printed {} bytes",
                    answer.stdout.len()
                );
                Ok(())
            })
        });
        let execs: Vec<_> = execs.collect();
        some_moment().await;
        case.stack.kill(Victim::in_turn(round))?;
        for exec in execs {
            exec.await?.with_context(|| format!("round {round}"))?;
        }
    }
    Ok(())
}

async fn killed_while_a_container_ends(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    for code in 0..kills() {
        let script = format!("echo begins; sleep 0.{}; echo ends; exit {}", code % 10, code + 1);
        let container = pod.start_at_last(shell(&format!("c{code}"), &script)).await?;
        some_moment().await;
        case.stack.kill(Victim::in_turn(code))?;
        let status = container.ended().await?;
        ensure!(status.exit_code == i32::try_from(code)? + 1, "{status:?}");
        ensure!(container.logs()?.stdout == "begins\nends\n", "{:?}", container.logs()?);
        case.cri.remove(&container.id).await?;
    }
    Ok(())
}

async fn killed_during_a_session(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    let container = pod.start(idle("c")).await?;
    let script = ["sh", "-c", "while read line; do echo \"got $line\"; [ \"$line\" = end ] && exit 5; done"];
    let mut session = Session::open(&case.cri.exec(&container.id, &script, false).await?).await?;
    for n in 0..kills() {
        session.write(&format!("before {n}\n")).await?;
        case.stack.kill(Victim::in_turn(n))?;
        session.write(&format!("after {n}\n")).await?;
        session.until(&format!("got after {n}\n"), PATIENCE).await?;
    }
    session.write("end\n").await?;
    let (stdout, stderr, result) = session.end(PATIENCE).await?;
    let expected: String = (0..kills()).map(|n| format!("got before {n}\ngot after {n}\n")).collect();
    ensure!(stdout == expected + "got end\n" && stderr.is_empty(), "{stdout:?} {stderr:?}");
    ensure!(result.contains("\"5\""), "{result}");
    Ok(())
}

/// containerd reads the logs again where it left off, with the same containers.
async fn killed_with_containerd(case: Case) -> Result<()> {
    let Bystander { pod, container } = Bystander::start(&case, 1000).await?;
    container.logged("line 20\n").await?;
    let worker = case.stack.worker()?;
    kill(worker, Signal::SIGKILL)?;
    case.stack.end("containerd", Signal::SIGKILL).await?;
    case.stack.run_up()?;
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    ensure!(case.stack.worker()? != worker);
    ensure!(container.sh("echo still here").await? == "still here");
    case.cri.stop(&container.id, 30).await?;
    ensure!(container.status().await?.exit_code == 7, "{:?}", container.status().await?);
    Ok(())
}

/// What `systemctl reload` does: front and worker may be another build.
async fn replaced(case: Case) -> Result<()> {
    let Bystander { pod, container } = Bystander::start(&case, 1000).await?;
    for _ in 0..kills() {
        let before = case.stack.worker()?;
        kill(case.stack.pid("sandboxer")?, Signal::SIGHUP)?;
        eventually("another worker", PATIENCE, || async {
            // While the old worker drains, there is no answer.
            Ok(case.stack.worker().ok().filter(|worker| *worker != before))
        })
        .await?;
        ensure!(container.sh("echo here").await? == "here");
        eventually("another front", PATIENCE, || async {
            let front = std::fs::read_to_string(format!("/proc/{}/cmdline", case.stack.front()?))?;
            Ok(front.contains("--resume").then_some(()))
        })
        .await?;
    }
    ensure!(pod.ready().await?);
    Bystander { pod, container }.end(&case).await.map(drop)
}

/// A worker whose threads are all stuck looks like this from outside.
async fn stopped(case: Case) -> Result<()> {
    let Bystander { pod, container } = Bystander::start(&case, 1000).await?;
    let worker = case.stack.worker()?;
    kill(worker, Signal::SIGSTOP)?;
    eventually("another worker", 2 * PATIENCE, || async {
        Ok(case.stack.worker().ok().filter(|now| *now != worker))
    })
    .await?;
    ensure!(container.sh("echo here").await? == "here");
    Bystander { pod, container }.end(&case).await.map(drop)
}

async fn killed_while_containers_are_made(case: Case) -> Result<()> {
    let pod = case.pod().await?;
    for round in 0..kills() {
        let made = (0..2).map(|n| {
            let (pod, cri) = (pod.clone(), case.cri.clone());
            tokio::spawn(async move {
                let config = shell(&format!("c{round}-{n}"), "echo made; exec sleep 1000");
                let container = pod.start_at_last(config).await?;
                container.logged("made").await?;
                ensure!(container.sh("echo in").await? == "in");
                cri.stop(&container.id, 0).await?;
                cri.remove(&container.id).await?;
                Ok(())
            })
        });
        let made: Vec<_> = made.collect();
        some_moment().await;
        case.stack.kill(Victim::in_turn(round))?;
        for made in made {
            made.await?.with_context(|| format!("round {round}"))?;
        }
    }
    Ok(())
}

/// The next worker does not treat a silent VMM as dead: it reports no exit, and all continues once it
/// answers.
async fn killed_while_a_vmm_stands_still(case: Case) -> Result<()> {
    let Bystander { pod, container } = Bystander::start(&case, 1000).await?;
    let vmms = case.stack.vmms()?;
    let [vmm] = vmms[..] else { anyhow::bail!("not one VMM: {vmms:?}") };
    kill(vmm, Signal::SIGSTOP)?;
    case.stack.kill_worker()?;
    let unknown = eventually("the pod is unknown", PATIENCE, || async {
        let output = case.stack.command("sandboxer-cli").args(["inspect", "--json", &pod.id]).output()?;
        Ok(serde_json::from_slice::<serde_json::Value>(&output.stdout)
            .ok()
            .filter(|answer| answer["state"] != "ready"))
    });
    let (unknown, status) = (unknown.await, container.status().await);
    kill(vmm, Signal::SIGCONT)?;
    let unknown = unknown?;
    ensure!(unknown["state"] == "unknown" && unknown["vmm_pid"] == vmm.as_raw(), "{unknown}");
    let status = status?;
    ensure!(status.state() == k8s_cri::v1::ContainerState::ContainerRunning, "{status:?}");
    eventually("pod ready again", PATIENCE, || async {
        Ok(case.cri.pod_ready(&pod.id).await.ok().filter(|ready| *ready))
    })
    .await?;
    ensure!(case.stack.vmms()? == vmms && container.sh("echo here").await? == "here");
    Bystander { pod, container }.end(&case).await.map(drop)
}
