//! Every snapshotter whose snapshots become disks: what the container sees, what is plugged in, what stays.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use sandboxer_e2e::case::{Case, Pod, idle};

crate::cases![
    Vm: overlayfs_shares_one_image, native_has_one_of_its_own, erofs_comes_as_it_is, blockfile_comes_as_it_is
];

/// Returns a pod with two containers that have shown that they can read the image and write over it.
async fn two_containers(case: &Case) -> Result<(Pod, [Vec<PathBuf>; 2])> {
    let pod = case.pod().await?;
    let expected = sum(Command::new("sha256sum").arg("/bin/busybox"))?;
    let mut disks = Vec::new();
    for name in ["one", "two"] {
        let container = pod.start(idle(name)).await?;
        let output = container
            .sh("sha256sum /bin/busybox && test ! -e /written && echo data > /written && cat /written")
            .await?;
        ensure!(output.starts_with(&expected) && output.ends_with("\ndata"), "{name}: {output}");
        let mut all = disks_of(case, &pod, &container.id)?;
        // What a container writes to, where that is not the snapshotter's, is its own.
        all.retain(|disk| !disk.starts_with(store(case).join("scratch")));
        disks.push(all);
    }
    let [one, two] = <[_; 2]>::try_from(disks).map_err(|_| anyhow::anyhow!("not two"))?;
    Ok((pod, [one, two]))
}

fn sum(command: &mut Command) -> Result<String> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    Ok(text.split_whitespace().next().context("no checksum")?.to_owned())
}

/// Returns the files and devices plugged in for a container, as the daemon tells.
fn disks_of(case: &Case, pod: &Pod, container: &str) -> Result<Vec<PathBuf>> {
    let inspected = case.stack.cli_json(&["inspect", &pod.id])?;
    let containers = inspected["containers"].as_array().context("no containers")?;
    let found = containers.iter().find(|one| one["id"] == container).context("container is not told")?;
    let disks = found["disks"].as_array().context("no disks")?;
    let disks: Vec<PathBuf> = disks.iter().filter_map(|disk| disk.as_str()).map(PathBuf::from).collect();
    ensure!(!disks.is_empty(), "no disk: {inspected}");
    Ok(disks)
}

fn store(case: &Case) -> PathBuf {
    case.stack.dir().join("sandboxer/state/rootfs")
}

async fn remove(case: &Case, pod: &Pod) -> Result<()> {
    case.cri.stop_pod(&pod.id).await?;
    Ok(case.cri.remove_pod(&pod.id).await?)
}

async fn overlayfs_shares_one_image(case: Case) -> Result<()> {
    let (pod, [one, two]) = two_containers(&case).await?;
    ensure!(one == two && one.len() == 1 && one[0].starts_with(store(&case)), "{one:?} {two:?}");
    remove(&case, &pod).await?;
    ensure!(one[0].exists(), "the image is not kept for the next pod");
    Ok(())
}

async fn native_has_one_of_its_own(case: Case) -> Result<()> {
    let case = Case { handler: "sandboxer-native", ..case };
    let (pod, [one, two]) = two_containers(&case).await?;
    let all: BTreeSet<_> = one.iter().chain(&two).collect();
    ensure!(all.len() == 2 && all.iter().all(|disk| disk.starts_with(store(&case))), "{all:?}");
    remove(&case, &pod).await?;
    ensure!(all.iter().all(|disk| !disk.exists()), "an image that nobody can use again is kept");
    Ok(())
}

/// The layer as containerd made it, and above it a file that the daemon makes a file system in.
async fn erofs_comes_as_it_is(case: Case) -> Result<()> {
    let case = Case { handler: "sandboxer-erofs", ..case };
    let (pod, [one, two]) = two_containers(&case).await?;
    ensure!(one.len() == 2 && two.len() == 2, "{one:?} {two:?}");
    ensure!(one[0] == two[0] && one[1] != two[1], "{one:?} {two:?}");
    of_containerd(&case, &[one, two].concat())?;
    remove(&case, &pod).await
}

async fn blockfile_comes_as_it_is(case: Case) -> Result<()> {
    let case = Case { handler: "sandboxer-blockfile", ..case };
    let (pod, [one, two]) = two_containers(&case).await?;
    ensure!(one.len() == 1 && two.len() == 1 && one != two, "{one:?} {two:?}");
    of_containerd(&case, &[one, two].concat())?;
    remove(&case, &pod).await
}

fn of_containerd(case: &Case, disks: &[PathBuf]) -> Result<()> {
    let root: &Path = &case.stack.dir().join("containerd/root");
    ensure!(disks.iter().all(|disk| disk.starts_with(root)), "{disks:?}");
    Ok(())
}
