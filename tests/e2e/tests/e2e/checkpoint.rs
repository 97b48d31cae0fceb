//! Pods that are saved while they run, and pods that go on from there.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_cri::v1::{ContainerConfig, ContainerState, PodSandboxConfig};
use sandboxer_e2e::case::{Case, Container, PATIENCE, Pod, idle, shell};
use sandboxer_e2e::eventually;
use sandboxer_e2e::kubelet::Kubelet;

use crate::templates::told;
use crate::volumes::mounted;

crate::cases![
    Vm: a_counter_goes_on_in_its_source_and_in_two_copies, a_copy_is_saved_and_goes_on_in_turn,
        volumes_go_on_and_files_are_the_new_pods,
        what_does_not_fit_is_refused_by_name;
    VmAlone: a_pod_that_is_being_saved_survives_the_worker
];

const RESTORE_FROM: &str = "io.sandboxer.restore-from";

/// Returns a container that counts in memory, and on its disk, and draws by chance what it prints.
fn counter() -> ContainerConfig {
    shell(
        "counter",
        "n=0; while :; do n=$((n + 1)); read id </proc/sys/kernel/random/uuid; echo $n >/count; echo \"$n $id\"; sleep 0.2; done",
    )
}

/// A pod with a counter, and a container beside it with disks that are plugged.
struct Counting {
    pod: Pod,
    counter: Container,
    beside: Container,
}

impl Counting {
    /// Returns the numbers that were printed, and what was drawn with each.
    fn printed(&self) -> Result<Vec<(u64, String)>> {
        let logs = self.counter.logs()?.stdout;
        let lines = logs.lines().filter_map(|line| line.split_once(' '));
        lines.map(|(n, id)| Ok((n.parse()?, id.to_owned()))).collect()
    }

    /// Waits until it has counted further.
    async fn counts(&self) -> Result<u64> {
        let before = self.printed()?.last().map_or(0, |(n, _)| *n);
        eventually("further numbers", PATIENCE, || async {
            Ok(self.printed()?.last().map(|(n, _)| *n).filter(|n| *n > before + 2))
        })
        .await
    }
}

async fn counting(case: &Case) -> Result<Counting> {
    let pod = case.pod().await?;
    let counter = pod.start(counter()).await?;
    let beside = pod.start(idle("beside")).await?;
    beside.sh("echo mine >/mine").await?;
    let counting = Counting { pod, counter, beside };
    counting.counts().await?;
    Ok(counting)
}

/// Saves a pod; returns the name of the checkpoint.
fn save(case: &Case, pod: &str) -> Result<String> {
    let name = format!("saved-{}", &pod[..12]);
    let made = told(case, &["checkpoint", "create", pod, &name])?;
    println!("saved: paused for {} ms", made[0]["paused_ns"].as_u64().unwrap_or_default() / 1_000_000);
    Ok(name)
}

fn remove(case: &Case, name: &str) -> Result<()> {
    told(case, &["checkpoint", "remove", "-n", "e2e", name]).map(drop)
}

fn from(name: &str, hostname: &str) -> impl FnOnce(&mut PodSandboxConfig) {
    move |config: &mut PodSandboxConfig| {
        config.annotations.insert(RESTORE_FROM.into(), name.into());
        config.hostname = hostname.into();
    }
}

/// Returns a pod that goes on from the checkpoint, and the first number that it printed.
async fn copy(case: &Case, name: &str, hostname: &str) -> Result<(Counting, u64)> {
    let pod = case.pod_with(from(name, hostname)).await?;
    let counter = pod.create(counter()).await?;
    let beside = pod.create(idle("beside")).await?;
    ensure!(counter.status().await?.state() == ContainerState::ContainerCreated);
    // Nothing runs before its start.
    tokio::time::sleep(Duration::from_secs(2)).await;
    ensure!(counter.logs().map_or(true, |logs| logs.stdout.is_empty()), "{hostname} runs before its start");
    case.cri.start(&counter.id).await?;
    case.cri.start(&beside.id).await?;
    let copy = Counting { pod, counter, beside };
    copy.counts().await?;
    let first = copy.printed()?.first().context("nothing was printed")?.0;
    Ok((copy, first))
}

async fn a_counter_goes_on_in_its_source_and_in_two_copies(case: Case) -> Result<()> {
    let source = counting(&case).await?;
    let before = source.printed()?.last().context("it counts")?.0;
    let name = save(&case, &source.pod.id)?;
    source.counts().await?;
    let listed = told(&case, &["checkpoint", "list"])?;
    let listed = listed.as_array().into_iter().flatten().find(|of| of["name"] == name.as_str());
    ensure!(listed.is_some_and(|of| of["problem"] == "" && of["namespace"] == "e2e"), "{listed:?}");

    let mut all = vec![source];
    for hostname in ["one", "two"] {
        let (copy, first) = copy(&case, &name, hostname).await?;
        ensure!(first > before.saturating_sub(1), "{hostname} began at {first}, the source was at {before}");
        ensure!(first < before + 60, "{hostname} began at {first}, the source was at {before}");
        ensure!(copy.beside.sh("cat /mine").await? == "mine", "{hostname} lost what was written");
        let said = copy.beside.sh("hostname; cat /etc/hostname").await?;
        ensure!(said == format!("{hostname}\n{hostname}"), "{said}");
        ensure!(told(&case, &["inspect", &copy.pod.id])?["start_path"] == "checkpoint");
        let off = copy.counter.sh("date +%s").await?.parse::<i64>()? - jiff::Timestamp::now().as_second();
        ensure!(off.abs() <= 5, "the clock of {hostname} is {off} s off");
        all.push(copy);
    }
    let (mut addresses, mut drawn) = (HashSet::new(), HashSet::new());
    for of in &all {
        let address = of.beside.sh("ip -4 -o address show dev eth0 | awk '{ print $4 }'").await?;
        let told = case.cri.pod_status(&of.pod.id).await?.0.network.context("no network")?.ip;
        ensure!(address.split('/').next() == Some(told.as_str()), "{address} instead of {told}");
        ensure!(addresses.insert(address.clone()), "two pods have {address}");
        of.counts().await?;
        for (n, id) in of.printed()? {
            ensure!(drawn.insert(id.clone()), "{id} was drawn twice, as number {n} the second time");
        }
        let numbers: Vec<u64> = of.printed()?.into_iter().map(|(n, _)| n).collect();
        ensure!(
            numbers.windows(2).all(|pair| pair[1] == pair[0] + 1),
            "a number is missing or doubled: {numbers:?}"
        );
    }
    // Removed while its copies run, which go on, as they do without their source.
    remove(&case, &name)?;
    case.remove(&all[0].pod.id).await?;
    for copy in &all[1..] {
        copy.counts().await?;
        case.cri.stop(&copy.counter.id, 0).await?;
        ensure!(copy.counter.ended().await?.exit_code == 137);
        case.cri.remove(&copy.counter.id).await?;
        ensure!(copy.beside.sh("cat /mine").await? == "mine");
    }
    Ok(())
}

/// And the copy's own key is not the first one's.
async fn a_copy_is_saved_and_goes_on_in_turn(case: Case) -> Result<()> {
    let source = counting(&case).await?;
    let first = save(&case, &source.pod.id)?;
    let (one, _) = copy(&case, &first, "one").await?;
    case.remove(&source.pod.id).await?;
    remove(&case, &first)?;
    let at = one.counts().await?;
    let second = save(&case, &one.pod.id)?;
    let (two, began) = copy(&case, &second, "two").await?;
    ensure!(began > at.saturating_sub(1), "it began at {began}, and was saved at {at} or later");
    ensure!(two.beside.sh("hostname; cat /mine").await? == "two\nmine");
    one.counts().await?;
    remove(&case, &second)
}

/// Makes a container that does not fit, and removes it: containerd asks for it when it is started.
async fn is_not_started(case: &Case, pod: &Pod, config: ContainerConfig, says: &str) -> Result<()> {
    let container = pod.create(config).await?;
    let Err(error) = case.cri.start(&container.id).await else { anyhow::bail!("it was started: {says}") };
    ensure!(error.message().contains(says), "{says:?} is not in {error}");
    Ok(case.cri.remove(&container.id).await?)
}

/// What is in an emptyDir goes on, in memory and on a disk, also for a container that is made anew. A configMap and a
/// token are those of the new pod, and are kept up to date.
async fn volumes_go_on_and_files_are_the_new_pods(case: Case) -> Result<()> {
    let (mut old, mut new) = (Kubelet::of(&case)?, Kubelet::of_another(&case, "-new")?);
    let volumes = |kubelet: &mut Kubelet, color: &str| {
        let settings = kubelet.files("configmap", "settings", &[("color", color)])?;
        let (disk, memory) = (kubelet.empty_dir("disk")?, kubelet.memory("memory", "4m")?);
        anyhow::Ok((settings, disk, memory))
    };
    let (of_old, of_new) = (volumes(&mut old, "red")?, volumes(&mut new, "green")?);
    let with = |config, (settings, disk, memory): &(PathBuf, PathBuf, PathBuf)| {
        let config = mounted(mounted(config, "/disk", disk, false), "/memory", memory, false);
        mounted(config, "/settings", settings, true)
    };
    let source = case.pod().await?;
    let one = source.start(with(idle("one"), &of_old)).await?;
    source.start(with(idle("two"), &of_old)).await?;
    one.sh("echo on disk >/disk/note; echo in memory >/memory/note").await?;
    let name = save(&case, &source.id)?;
    one.sh("echo later >/disk/note; echo later >/memory/note").await?;

    let uid = new.uid();
    let copied = case.pod_with(|config| {
        from(&name, "copy")(config);
        config.metadata.get_or_insert_default().uid = uid;
    });
    let copied = copied.await?;
    is_not_started(&case, &copied, idle("one"), "container \"one\" lacks its volume at \"/disk\"").await?;
    let one = copied.start(with(idle("one"), &of_new)).await?;
    let two = copied.start(with(idle("two"), &of_new)).await?;
    let read = "cat /disk/note /memory/note /settings/color";
    for container in [&one, &two] {
        let said = container.sh(read).await?;
        ensure!(said == "on disk\nin memory\ngreen", "{said}");
    }
    one.sh("echo more >/disk/note; echo more >/memory/note").await?;
    new.replace(&of_new.0, &[("color", "blue")])?;
    eventually("the new color", PATIENCE, || async {
        Ok((two.sh(read).await? == "more\nmore\nblue").then_some(()))
    })
    .await?;
    case.cri.stop(&one.id, 0).await?;
    case.cri.remove(&one.id).await?;
    let again = copied.start(with(idle("one"), &of_new)).await?;
    let said = again.sh(read).await?;
    ensure!(said == "more\nmore\nblue", "a container that is made anew has other volumes: {said}");
    remove(&case, &name)
}

async fn what_does_not_fit_is_refused_by_name(case: Case) -> Result<()> {
    let source = counting(&case).await?;
    let name = save(&case, &source.pod.id)?;
    let pods = case.pods().await?.len();
    let refused = async |adjust: Box<dyn FnOnce(&mut PodSandboxConfig) + Send>, says: &str| {
        let Err(error) = case.pod_with(adjust).await else {
            anyhow::bail!("a pod runs that was to be refused: {says}")
        };
        ensure!(error.message().contains(says), "{says:?} is not in {error}");
        anyhow::Ok(())
    };
    let named = name.clone();
    refused(Box::new(from("nosuch", "x")), "checkpoint e2e/nosuch: there is none of this name").await?;
    refused(
        Box::new(move |config| {
            from(&named, "x")(config);
            config.metadata.get_or_insert_default().namespace = "other".into();
        }),
        &format!("checkpoint other/{name}: there is none of this name"),
    )
    .await?;
    let named = name.clone();
    refused(
        Box::new(move |config| {
            from(&named, "x")(config);
            config.annotations.insert("io.sandboxer.memory".into(), "320".into());
        }),
        "give it the same requests and limits",
    )
    .await?;

    let pod = case.pod_with(from(&name, "x")).await?;
    for (config, says) in [
        (idle("third"), "it has no container \"third\""),
        (idle("counter"), "container \"counter\" is another one: its command is"),
    ] {
        is_not_started(&case, &pod, config, says).await?;
    }
    pod.start(counter()).await?;
    case.remove(&pod.id).await?;

    let dir = directory(&case, &name);
    for file in ["memory", "checkpoint.json"] {
        flip(&dir.join(file))?;
        refused(Box::new(from(&name, "x")), "damaged").await?;
        let inspected = case
            .stack
            .command("sandboxer-cli")
            .args(["checkpoint", "inspect", "-n", "e2e", &name])
            .output()?;
        ensure!(!inspected.status.success(), "a damaged checkpoint is shown as whole");
        flip(&dir.join(file))?;
    }
    remove(&case, &name)?;
    ensure!(!dir.exists(), "its files are left");
    refused(Box::new(from(&name, "x")), "there is none of this name").await?;
    ensure!(case.pods().await?.len() == pods, "a pod that was refused is left");
    source.counts().await.map(drop)
}

fn directory(case: &Case, name: &str) -> PathBuf {
    case.stack.daemon_dirs()[1].join("checkpoints/e2e").join(name)
}

fn flip(path: &PathBuf) -> Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    // A page that is surely not empty: the guest's kernel is there.
    let at = if file.metadata()?.len() > 32 << 20 { 20 << 20 } else { 300 };
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    Ok(file.write_all_at(&[byte[0] ^ 1], at)?)
}

/// Whatever it was doing: the pod goes on, and the checkpoint is whole or not there.
async fn a_pod_that_is_being_saved_survives_the_worker(case: Case) -> Result<()> {
    let source = counting(&case).await?;
    for after_ms in [20, 100, 250, 500] {
        let name = format!("killed-{after_ms}");
        let mut saving = case
            .stack
            .command("sandboxer-cli")
            .args(["checkpoint", "create", &source.pod.id, &name])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        tokio::time::sleep(Duration::from_millis(after_ms)).await;
        let worker = case.stack.kill_worker()?;
        eventually("the next worker", PATIENCE, || async {
            Ok(case.stack.worker().ok().filter(|now| *now != worker))
        })
        .await?;
        saving.wait()?;
        eventually("a pod that goes on", PATIENCE, || async {
            Ok(case.cri.pod_ready(&source.pod.id).await.ok().filter(|ready| *ready))
        })
        .await?;
        source.counts().await.with_context(|| format!("killed after {after_ms} ms"))?;
        let all = directory(&case, "").join("..");
        let half = fs::read_dir(all)?.flatten().find(|entry| entry.file_name().as_encoded_bytes()[0] == b'.');
        ensure!(half.is_none(), "{half:?} is left");
        let listed = told(&case, &["checkpoint", "list"])?;
        for of in listed.as_array().into_iter().flatten().filter(|of| of["name"] == name.as_str()) {
            ensure!(of["problem"] == "", "{of}");
            remove(&case, &name)?;
        }
    }
    let name = save(&case, &source.pod.id)?;
    let (copy, _) = copy(&case, &name, "copy").await?;
    copy.counts().await?;
    remove(&case, &name)
}
