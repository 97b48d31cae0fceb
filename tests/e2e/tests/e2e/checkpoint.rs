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
use sandboxer_e2e::cri::Cri;
use sandboxer_e2e::eventually;
use sandboxer_e2e::failing::{Failing, arm, reached};
use sandboxer_e2e::insist::insist;
use sandboxer_e2e::kubelet::Kubelet;

use crate::parity::{image, of_image};
use crate::volumes::mounted;

crate::cases![
    Vm: a_counter_goes_on_in_its_source_and_in_two_copies, a_copy_is_saved_and_goes_on_in_turn,
        volumes_go_on_and_files_are_the_new_pods,
        what_does_not_fit_is_refused_by_name,
        a_tag_that_moved_is_another_image,
        a_pod_goes_on_by_the_calls_of_cri,
        a_pod_that_is_saved_last_goes_on_from_an_archive,
        a_program_gets_a_signal_when_it_goes_on;
    VmAlone: a_pod_that_is_being_saved_survives_the_worker, killed_at_every_point_of_a_save_and_a_restore
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
    let made = case.stack.cli_json(&["checkpoint", "create", pod, &name])?;
    println!("saved: paused for {} ms", made[0]["paused_ns"].as_u64().unwrap_or_default() / 1_000_000);
    Ok(name)
}

fn remove(case: &Case, name: &str) -> Result<()> {
    case.stack.cli_json(&["checkpoint", "remove", "-n", "e2e", name]).map(drop)
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
    let listed = case.stack.cli_json(&["checkpoint", "list"])?;
    let listed =
        listed.as_array().into_iter().flatten().find(|checkpoint| checkpoint["name"] == name.as_str());
    ensure!(
        listed.is_some_and(|checkpoint| checkpoint["problem"] == "" && checkpoint["namespace"] == "e2e"),
        "{listed:?}"
    );

    let mut all = vec![source];
    for hostname in ["one", "two"] {
        let (copy, first) = copy(&case, &name, hostname).await?;
        ensure!(first > before.saturating_sub(1), "{hostname} began at {first}, the source was at {before}");
        ensure!(first < before + 60, "{hostname} began at {first}, the source was at {before}");
        ensure!(copy.beside.sh("cat /mine").await? == "mine", "{hostname} lost what was written");
        let output = copy.beside.sh("hostname; cat /etc/hostname").await?;
        ensure!(output == format!("{hostname}\n{hostname}"), "{output}");
        ensure!(case.stack.cli_json(&["inspect", &copy.pod.id])?["start_path"] == "checkpoint");
        let off = copy.counter.sh("date +%s").await?.parse::<i64>()? - jiff::Timestamp::now().as_second();
        ensure!(off.abs() <= 5, "the clock of {hostname} is {off} s off");
        all.push(copy);
    }
    let (mut addresses, mut drawn) = (HashSet::new(), HashSet::new());
    for counting in &all {
        let address = counting.beside.sh("ip -4 -o address show dev eth0 | awk '{ print $4 }'").await?;
        let reported = case.cri.pod_status(&counting.pod.id).await?.0.network.context("no network")?.ip;
        ensure!(address.split('/').next() == Some(reported.as_str()), "{address} instead of {reported}");
        ensure!(addresses.insert(address.clone()), "two pods have {address}");
        counting.counts().await?;
        for (n, id) in counting.printed()? {
            ensure!(drawn.insert(id.clone()), "{id} was drawn twice, as number {n} the second time");
        }
        let numbers: Vec<u64> = counting.printed()?.into_iter().map(|(n, _)| n).collect();
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
    let (mut old, mut new) = (Kubelet::new(&case)?, Kubelet::named(&case, "-new")?);
    let volumes = |kubelet: &mut Kubelet, color: &str| {
        let settings = kubelet.files("configmap", "settings", &[("color", color)])?;
        let (disk, memory) = (kubelet.empty_dir("disk")?, kubelet.memory("memory", "4m")?);
        anyhow::Ok((settings, disk, memory))
    };
    let (of_old, of_new) = (volumes(&mut old, "red")?, volumes(&mut new, "green")?);
    let with_volumes = |config, (settings, disk, memory): &(PathBuf, PathBuf, PathBuf)| {
        let config = mounted(mounted(config, "/disk", disk, false), "/memory", memory, false);
        mounted(config, "/settings", settings, true)
    };
    let source = case.pod().await?;
    let one = source.start(with_volumes(idle("one"), &of_old)).await?;
    source.start(with_volumes(idle("two"), &of_old)).await?;
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
    let one = copied.start(with_volumes(idle("one"), &of_new)).await?;
    let two = copied.start(with_volumes(idle("two"), &of_new)).await?;
    let read = "cat /disk/note /memory/note /settings/color";
    for container in [&one, &two] {
        let output = container.sh(read).await?;
        ensure!(output == "on disk\nin memory\ngreen", "{output}");
    }
    one.sh("echo more >/disk/note; echo more >/memory/note").await?;
    new.replace(&of_new.0, &[("color", "blue")])?;
    eventually("the new color", PATIENCE, || async {
        Ok((two.sh(read).await? == "more\nmore\nblue").then_some(()))
    })
    .await?;
    case.cri.stop(&one.id, 0).await?;
    case.cri.remove(&one.id).await?;
    let again = copied.start(with_volumes(idle("one"), &of_new)).await?;
    let output = again.sh(read).await?;
    ensure!(output == "more\nmore\nblue", "a container that is made anew has other volumes: {output}");
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

/// As kubelet would, if containerd passed the calls on.
async fn a_pod_goes_on_by_the_calls_of_cri(case: Case) -> Result<()> {
    let source = counting(&case).await?;
    let dir = tempfile::tempdir()?;
    let daemon = Cri::connect(case.stack.env("SANDBOXER_SOCKET").context("the admin socket")?.into())?;
    let before = source.printed()?.last().context("it counts")?.0;
    daemon.checkpoint_pod(&source.pod.id, dir.path(), &[&source.counter.id, &source.beside.id]).await?;
    source.counts().await?;
    let mut config = case.pod_config();
    config.hostname = "again".into();
    let (counter, beside) = (counter(), idle("beside"));
    let wrong = daemon.restore_pod(dir.path(), &config, case.handler, vec![counter.clone()]).await;
    let error = wrong.err().context("a container is missing")?;
    ensure!(
        error.code() == tonic::Code::FailedPrecondition
            && error.message().contains("those given are counter"),
        "{error}"
    );
    let containers = vec![counter.clone(), beside.clone()];
    let restored = daemon.restore_pod(dir.path(), &config, case.handler, containers).await?;
    let pod = case.pod_of(&restored.pod_sandbox_id, config);
    let id = |name: &str| {
        let found = restored.restored_containers.iter().find(|container| container.name == name);
        found.map(|container| container.container_id.clone()).context("a container is missing")
    };
    let (counter, beside) =
        (pod.container(&id("counter")?, &counter), pod.container(&id("beside")?, &beside));
    ensure!(counter.status().await?.state() == ContainerState::ContainerCreated);
    for container in [&counter, &beside] {
        case.cri.start(&container.id).await?;
    }
    let copy = Counting { pod, counter, beside };
    copy.counts().await?;
    let first = copy.printed()?.first().context("nothing was printed")?.0;
    ensure!(first >= before, "it began at {first}, and the source was at {before}");
    ensure!(copy.beside.sh("cat /mine; hostname").await? == "mine\nagain");
    // Nothing of it is left in the store.
    let listed = case.stack.cli_json(&["checkpoint", "list"])?;
    let listed: Vec<_> = listed.as_array().into_iter().flatten().collect();
    ensure!(
        !listed.iter().any(|of| of["name"].as_str().is_some_and(|name| name.starts_with("cri-"))),
        "{listed:?}"
    );
    Ok(())
}

async fn a_tag_that_moved_is_another_image(case: Case) -> Result<()> {
    const TAG: &str = "example.test/moves:1";
    // CRI learns by an event to what a name refers.
    let moved = async |to: &str, before: Option<String>| {
        let mut command = case.stack.command("ctr");
        command.args(["images", "tag", "--force", to, TAG]);
        let output = tokio::task::spawn_blocking(move || command.output()).await??;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        eventually("the moved tag", PATIENCE, || async {
            Ok(case.cri.image(TAG).await?.filter(|now| Some(now) != before.as_ref()))
        })
        .await
    };
    let images = ["example.test/first:1", "example.test/second:1"];
    for name in images {
        image(&case, name, |root| Ok(fs::write(root.join("etc/name"), name)?), &[]).await?;
    }
    let config = || {
        let mut config = of_image(idle("one"), TAG);
        // As kubelet says it. containerd would name any of the image's tags.
        config.image.get_or_insert_default().user_specified_image = TAG.into();
        config
    };
    let first = moved(images[0], None).await?;
    let source = case.pod().await?;
    source.start(config()).await?;
    let name = save(&case, &source.id)?;
    let second = moved(images[1], Some(first.clone())).await?;
    let copied = case.pod_with(from(&name, "copy")).await?;
    let says = format!(" is {second}, and was {first}");
    is_not_started(&case, &copied, config(), &says).await?;
    moved(images[0], Some(second)).await?;
    let one = copied.start(config()).await?;
    ensure!(one.sh("cat /etc/name").await? == images[0]);
    remove(&case, &name)
}

/// The source ends when it is saved and nothing is lost in between; the archive is all that is left of it.
async fn a_pod_that_is_saved_last_goes_on_from_an_archive(case: Case) -> Result<()> {
    let source = counting(&case).await?;
    let name = format!("last-{}", &source.pod.id[..12]);
    case.stack.cli_json(&["checkpoint", "create", "--stop", &source.pod.id, &name])?;
    ensure!(!case.cri.pod_ready(&source.pod.id).await?, "the source is still ready");
    ensure!(source.counter.ended().await?.exit_code == 137);
    let last = source.printed()?.last().context("it counts")?.0;
    let archive = case.stack.dir().join(format!("{name}.zst"));
    let file = archive.to_str().context("a path in UTF-8")?;
    case.stack.cli_json(&["checkpoint", "export", "-n", "e2e", &name, file])?;
    case.remove(&source.pod.id).await?;
    remove(&case, &name)?;

    let whole = fs::read(&archive)?;
    fs::write(&archive, &whole[..whole.len() / 2])?;
    let cut = case.stack.command("sandboxer-cli").args(["checkpoint", "import", file]).output()?;
    // Other cases have checkpoints meanwhile.
    let listed = case.stack.cli_json(&["checkpoint", "list"])?;
    let is_listed = listed.as_array().into_iter().flatten().any(|one| one["name"] == name.as_str());
    ensure!(!cut.status.success() && !is_listed, "{cut:?}");
    fs::write(&archive, &whole)?;
    let imported = format!("{name}-again");
    let made = case.stack.cli_json(&["checkpoint", "import", "--name", &imported, file])?;
    fs::remove_file(&archive)?;
    println!("the archive of {} bytes has {}", made[0]["stored_bytes"], whole.len());
    let (copy, first) = copy(&case, &imported, "elsewhere").await?;
    // What the source had counted and not printed is printed by the copy.
    ensure!(first == last || first == last + 1, "it began at {first}, and the source ended at {last}");
    ensure!(copy.beside.sh("cat /mine").await? == "mine");
    remove(&case, &imported)
}

async fn a_program_gets_a_signal_when_it_goes_on(case: Case) -> Result<()> {
    let handler =
        || shell("handler", "trap 'echo signalled >>/seen' USR1; touch /seen; while :; do sleep 0.1; done");
    let source = case.pod().await?;
    let there = source.start(handler()).await?;
    let deaf = source.start(idle("deaf")).await?;
    eventually("the handler", PATIENCE, || async { Ok(there.sh("ls /seen").await.ok()) }).await?;
    let name = save(&case, &source.id)?;
    ensure!(there.sh("cat /seen").await?.is_empty(), "the source got the signal");
    deaf.sh("true").await?;
    let signal = |config: &mut PodSandboxConfig, signal: &str| {
        from(&name, "copy")(config);
        config.annotations.insert("io.sandboxer.restore-signal".into(), signal.into());
    };
    let Err(error) = case.pod_with(|config| signal(config, "SIGKILL")).await else {
        anyhow::bail!("an unknown signal is accepted")
    };
    ensure!(error.message().contains("it may be one of SIGHUP, SIGUSR1"), "{error}");
    let copied = case.pod_with(|config| signal(config, "SIGUSR1")).await?;
    let (here, deaf) = (copied.start(handler()).await?, copied.start(idle("deaf")).await?);
    eventually("the signal", PATIENCE, || async {
        Ok((here.sh("cat /seen").await? == "signalled").then_some(()))
    })
    .await?;
    // The first process of a container ignores what it does not handle.
    deaf.sh("true").await?;
    ensure!(here.sh("cat /seen").await? == "signalled", "it got the signal twice");
    remove(&case, &name)
}

/// At each point of a save and of a restore the worker dies once. The source goes on, a checkpoint is whole or not there, and a copy that
/// was to be made can be made.
async fn killed_at_every_point_of_a_save_and_a_restore(case: Case) -> Result<()> {
    let failing = Failing::start(&case, None).await?;
    let outcome = at_every_point(&case, &failing).await;
    failing.end().await?;
    outcome
}

async fn at_every_point(case: &Case, failing: &Failing<'_>) -> Result<()> {
    let source = counting(case).await?;
    let name = save(case, &source.pod.id)?;
    let (first, _) = copy(case, &name, "copy").await?;
    case.remove(&first.pod.id).await?;
    remove(case, &name)?;
    let mut points = failing.lines("passed")?;
    points.retain(|point| ["checkpoint", "saved", "saving"].iter().any(|word| point.contains(word)));
    ensure!(points.len() > 10, "only {} points: {points:?}", points.len());
    println!("{} points: {points:?}", points.len());
    let armed: Vec<String> = points.iter().cloned().chain(["no point".to_owned()]).collect();
    arm(&case.stack, &armed)?;
    case.stack.kill_worker()?;
    reached(case).await?;
    // The worker takes the next line when it starts.
    for round in 0..2 * armed.len() {
        let left = failing.lines("armed")?.len();
        if left == 0 {
            break;
        }
        let at = armed.get(armed.len() - left - 1).map_or("the last point", String::as_str);
        let name = format!("round-{round}");
        let created = case
            .stack
            .command("sandboxer-cli")
            .args(["checkpoint", "create", &source.pod.id, &name])
            .output()?;
        reached(case).await?;
        source.counts().await.with_context(|| format!("the source after {at:?}"))?;
        let all = directory(case, "").join("..");
        let half = fs::read_dir(all)?.flatten().find(|entry| entry.file_name().as_encoded_bytes()[0] == b'.');
        ensure!(half.is_none(), "{half:?} is left after {at:?}");
        let listed = case.stack.cli_json(&["checkpoint", "list"])?;
        let listed: Vec<_> = listed.as_array().into_iter().flatten().collect();
        ensure!(listed.iter().all(|checkpoint| checkpoint["problem"] == ""), "{listed:?} after {at:?}");
        ensure!(!created.status.success() || !listed.is_empty(), "{name} is lost after {at:?}");
        if listed.iter().any(|checkpoint| checkpoint["name"] == name.as_str()) {
            let pod = insist("start a copy", || async { case.pod_with(from(&name, "copy")).await }).await?;
            let counter = pod.start_at_last(counter()).await.with_context(|| format!("after {at:?}"))?;
            pod.start_at_last(idle("beside")).await.with_context(|| format!("after {at:?}"))?;
            eventually("the copy's numbers", PATIENCE, || async {
                Ok(counter.logs().ok().filter(|logs| !logs.stdout.is_empty()))
            })
            .await?;
            insist("stop the copy", || case.cri.stop_pod(&pod.id)).await?;
            insist("remove the copy", || case.cri.remove_pod(&pod.id)).await?;
            eventually("its removal", PATIENCE, || async {
                let output = case
                    .stack
                    .command("sandboxer-cli")
                    .args(["checkpoint", "remove", "-n", "e2e", &name])
                    .output()?;
                let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
                Ok((output.status.success() || stderr.contains("there is none")).then_some(()))
            })
            .await?;
        }
    }
    ensure!(failing.lines("armed")?.is_empty(), "not all points were reached: {:?}", failing.lines("armed")?);
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
        let listed = case.stack.cli_json(&["checkpoint", "list"])?;
        for checkpoint in
            listed.as_array().into_iter().flatten().filter(|checkpoint| checkpoint["name"] == name.as_str())
        {
            ensure!(checkpoint["problem"] == "", "{checkpoint}");
            remove(&case, &name)?;
        }
    }
    let name = save(&case, &source.pod.id)?;
    let (copy, _) = copy(&case, &name, "copy").await?;
    copy.counts().await?;
    remove(&case, &name)
}
