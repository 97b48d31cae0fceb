//! Translates a container's mounts for its guest.

use std::{
    collections::HashMap,
    net::IpAddr,
    path::{Path, PathBuf},
};

use oci_spec::runtime::{Mount, MountBuilder};
use sandboxer_host::{
    helper::Helpers,
    volume::{Bound, Kind, Needed, Volume, VolumeError},
};
use sandboxer_protocol::{agent::File, id::ContainerId};
use sandboxer_share::attach::Access;

use super::spec::{invalid, unsupported};
use crate::{error::PodError, pod::spec::PodSpec, share::Share};

/// File systems that a guest mounts by itself.
const GUEST_FILE_SYSTEMS: [&str; 7] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"];

/// Shared by all containers of a pod, unless one of them has a volume there.
const SHARED_MEMORY: &str = "/dev/shm";

/// A container's mounts by kind.
#[derive(Debug, Default)]
pub struct Mounts {
    /// Mounted by the guest's runtime.
    pub kept: Vec<Mount>,
    /// Files copied into the container.
    pub files: Vec<File>,
    /// Volumes that the guest must have before.
    pub needed: Vec<Needed>,
    /// The live shares of the guest.
    pub shares: Vec<Share>,
    /// Path of the container's termination message on the host.
    pub message: Option<PathBuf>,
}

/// Sources of bind mounts, by their index in the container's mounts, with the content of files.
pub type Looked = HashMap<usize, (Bound, Vec<u8>)>;

/// Reads the sources of a container's bind mounts in helper processes.
pub async fn look(helpers: &Helpers, pod: &PodSpec, mounts: &[Mount]) -> Result<Looked, PodError> {
    let mut looked = Looked::new();
    for (at, mount) in mounts.iter().enumerate().filter(|(_, mount)| is_looked_at(mount)) {
        looked.insert(at, helpers.look(&pod.id, mount).await.map_err(VolumeError::from)?);
    }
    Ok(looked)
}

/// Reads the sources of bind mounts in this thread; for sources that cannot hang.
#[cfg(any(test, fuzzing))]
pub fn looked_at(mounts: &[Mount]) -> Result<Looked, PodError> {
    let binds = mounts.iter().enumerate().filter(|(_, mount)| is_looked_at(mount));
    Ok(binds.map(|(at, mount)| Ok((at, Bound::look(mount)?))).collect::<Result<_, VolumeError>>()?)
}

/// Returns whether a mount's source is a path.
fn is_looked_at(mount: &Mount) -> bool {
    let fstype = mount.typ().as_deref().unwrap_or("");
    is_bind(mount) && !is_the_pods_shared_memory(mount) && !GUEST_FILE_SYSTEMS.contains(&fstype)
}

/// Sorts the mounts of `container`, whose bind mounts are in `looked`; unsupported mounts are rejected by name.
pub fn convert(
    pod: &PodSpec,
    container: &ContainerId,
    mounts: Vec<Mount>,
    mut looked: Looked,
) -> Result<Mounts, PodError> {
    let mut all = Mounts { files: files(pod), ..Default::default() };
    for (at, mount) in mounts.into_iter().enumerate() {
        let fstype = mount.typ().as_deref().unwrap_or("");
        let mapped = |ids: &Option<Vec<_>>| ids.as_ref().is_some_and(|ids| !ids.is_empty());
        if mapped(mount.uid_mappings()) || mapped(mount.gid_mappings()) {
            let what = format!("volume {} with mapped ids", mount.destination().display());
            return Err(unsupported(container, &what, "a guest has the host's ids"));
        }
        if is_the_pods_shared_memory(&mount) {
            // Mounted below, in the guest.
        } else if GUEST_FILE_SYSTEMS.contains(&fstype) {
            all.kept.push(mount);
        } else if let Some((bound, content)) = looked.remove(&at) {
            all.bind(pod, container, bound, content)?;
        } else {
            let what = format!("volume {} (of type {fstype:?})", mount.destination().display());
            return Err(unsupported(container, &what, "it is none that a guest can mount by itself"));
        }
    }
    if !all.kept.iter().any(|mount| mount.destination() == Path::new(SHARED_MEMORY)) {
        let options = ["rbind", "rw", "nosuid", "nodev", "noexec"].map(str::to_owned).to_vec();
        all.kept.push(bind(container, SHARED_MEMORY.as_ref(), SHARED_MEMORY.into(), options)?);
    }
    Ok(all)
}

impl Mounts {
    fn bind(
        &mut self,
        pod: &PodSpec,
        container: &ContainerId,
        Bound { volume, file, inode }: Bound,
        content: Vec<u8>,
    ) -> Result<(), PodError> {
        if let Some(meta) = file {
            let is_message = volume.kind == Kind::TerminationMessage;
            self.copy(File {
                path: volume.at.to_string_lossy().into_owned(),
                content,
                mode: meta.mode,
                uid: meta.uid,
                gid: meta.gid,
                read_only: volume.read_only,
                is_message,
                ..Default::default()
            });
            if is_message {
                self.message = Some(volume.source);
            }
            return Ok(());
        }
        match &volume.kind {
            // These are copied.
            Kind::File | Kind::TerminationMessage => {}
            Kind::Projected | Kind::ProjectedPart | Kind::EmptyDir(_) => {
                if let Some((needed, at)) = volume.needed() {
                    self.kept.push(bind(container, &volume.at, at, volume.options)?);
                    self.needed.push(needed);
                }
            }
            Kind::Live => {
                let Volume { at, source, read_only, follows_host_mounts, mut options, .. } = volume;
                let access = match read_only {
                    false => Access::ReadWrite,
                    true if options.iter().any(|option| option == "rro") => Access::RecursivelyReadOnly,
                    true => {
                        // Enforced on the host; for the guest, it is one mount with its submounts.
                        options.retain(|option| option != "ro");
                        Access::ReadOnly
                    }
                };
                let share = Share::of(&source, inode, access, follows_host_mounts).map_err(|error| {
                    PodError::Path { pod: pod.id.clone(), action: "look at", path: source, source: error }
                })?;
                self.kept.push(bind(container, &at, share.guest_path(), options)?);
                self.shares.push(share);
            }
        }
        Ok(())
    }

    /// Adds a file to copy; it replaces an earlier one with the same path.
    fn copy(&mut self, file: File) {
        self.files.retain(|other| other.path != file.path);
        self.files.push(file);
    }
}

/// Returns whether this is containerd's mount at /dev/shm: a tmpfs, the host's own, or the one created for the
/// pod on the host, `…/sandboxes/<id>/shm`.
fn is_the_pods_shared_memory(mount: &Mount) -> bool {
    let source = mount.source().as_deref().unwrap_or(Path::new(""));
    let of_a_pod =
        source.ends_with("shm") && source.iter().rev().nth(2).is_some_and(|dir| dir == "sandboxes");
    let of_containerd = !is_bind(mount) || source == Path::new(SHARED_MEMORY) || of_a_pod;
    mount.destination() == Path::new(SHARED_MEMORY) && of_containerd
}

fn is_bind(mount: &Mount) -> bool {
    mount.typ().as_deref() == Some("bind")
        || mount.options().iter().flatten().any(|option| option == "bind" || option == "rbind")
}

fn bind(
    container: &ContainerId,
    at: &Path,
    source: PathBuf,
    options: Vec<String>,
) -> Result<Mount, PodError> {
    MountBuilder::default()
        .destination(at)
        .typ("bind")
        .source(source)
        .options(options)
        .build()
        .map_err(|error| invalid(container, error.to_string()))
}

/// Files that every container of a pod has.
fn files(pod: &PodSpec) -> Vec<File> {
    let file = |path: &str, content: String| File {
        path: path.to_owned(),
        content: content.into_bytes(),
        mode: 0o644,
        ..Default::default()
    };
    let mut files =
        vec![file("/etc/hostname", format!("{}\n", pod.hostname)), file("/etc/hosts", hosts(pod))];
    files.extend(pod.resolv_conf.clone().map(|content| file("/etc/resolv.conf", content)));
    files
}

/// Returns the file as kubelet writes it, which it does only for its own pods.
fn hosts(pod: &PodSpec) -> String {
    let mut text = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n".to_owned();
    let alone = [IpAddr::from([127, 0, 1, 1])];
    for ip in if pod.ips.is_empty() { &alone[..] } else { &pod.ips } {
        text += &format!("{ip}\t{}\n", pod.hostname);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::MetadataExt};

    use super::*;
    use crate::pod::journal::tests::record;

    fn mount(at: &str, source: &Path, options: &[&str]) -> Mount {
        let options = options.iter().map(|&option| option.to_owned()).collect::<Vec<_>>();
        MountBuilder::default().destination(at).typ("bind").source(source).options(options).build().unwrap()
    }

    fn converted(mounts: Vec<Mount>) -> Result<Mounts, PodError> {
        let looked = looked_at(&mounts)?;
        convert(&record("p").spec, &"c".parse().unwrap(), mounts, looked)
    }

    #[test]
    fn a_mount_with_mapped_ids_is_refused_by_name() {
        let mut mapped = mount("/data", Path::new("/srv"), &["rbind"]);
        mapped.set_uid_mappings(Some(vec![oci_spec::runtime::LinuxIdMapping::default()]));
        let error = converted(vec![mapped]).unwrap_err().to_string();
        assert!(error.contains("volume /data with mapped ids"), "{error}");
    }

    #[test]
    fn a_host_directory_is_shared_and_mounted_from_where_the_guest_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let all = converted(vec![mount("/data", dir.path(), &["rbind", "ro", "rslave"])]).unwrap();
        let found = fs::metadata(dir.path()).unwrap();
        let inode = (found.dev(), found.ino());
        assert_eq!(all.shares, [Share::of(dir.path(), inode, Access::ReadOnly, true).unwrap()]);
        let kept = all.kept.iter().find(|mount| mount.destination() == Path::new("/data")).unwrap();
        assert_eq!(kept.source().clone(), Some(all.shares[0].guest_path()));
        assert_eq!(kept.options().clone().unwrap(), ["rbind"], "the host holds it to that");
    }

    #[test]
    fn a_mounted_hosts_file_replaces_ours() {
        let dir = tempfile::tempdir().unwrap();
        let hosts = dir.path().join("hosts");
        fs::write(&hosts, "192.0.2.1 peer\n").unwrap();
        let files = converted(vec![mount("/etc/hosts", &hosts, &["rbind", "ro"])]).unwrap().files;
        let found: Vec<_> = files.iter().filter(|file| file.path == "/etc/hosts").collect();
        assert_eq!(found.len(), 1);
        assert!(found[0].content.starts_with(b"192.0.2.1") && found[0].read_only);
    }

    #[test]
    fn shared_memory_is_the_pods_unless_a_volume_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("pods/u/volumes/kubernetes.io~empty-dir/shm");
        fs::create_dir_all(&volume).unwrap();
        let source = |mounts| {
            let kept = converted(mounts).unwrap().kept;
            let mut found = kept.iter().filter(|mount| mount.destination() == Path::new("/dev/shm"));
            let source = found.next().unwrap().source().clone().unwrap();
            assert_eq!(found.next(), None);
            source
        };
        let pods = mount("/dev/shm", Path::new("/run/sandboxes/p/shm"), &["rbind"]);
        assert_eq!(source(vec![pods]), Path::new("/dev/shm"));
        assert_eq!(source(vec![]), Path::new("/dev/shm"));
        let own = source(vec![mount("/dev/shm", &volume, &["rbind"])]);
        assert!(own.starts_with(sandboxer_protocol::VOLUMES_DIR), "{own:?}");
    }

    #[test]
    fn a_kubelets_volumes_are_mounted_from_the_guests_own_and_its_files_copied() {
        let dir = tempfile::tempdir().unwrap();
        let pod = dir.path().join("pods/u");
        let at = |path: &str| pod.join(path);
        for path in
            ["volumes/kubernetes.io~secret/s/..1", "volumes/kubernetes.io~empty-dir/e", "containers/c"]
        {
            fs::create_dir_all(at(path)).unwrap();
        }
        fs::write(at("containers/c/0a"), "").unwrap();
        fs::write(at("volumes/kubernetes.io~secret/s/..1/key"), "secret").unwrap();
        let all = converted(vec![
            mount("/s", &at("volumes/kubernetes.io~secret/s"), &["rbind", "rprivate", "ro"]),
            mount("/key", &at("volumes/kubernetes.io~secret/s/..1/key"), &["rbind", "ro"]),
            mount("/e/x", &at("volumes/kubernetes.io~empty-dir/e/x"), &["rbind", "rw"]),
            mount("/dev/termination-log", &at("containers/c/0a"), &["rbind", "rw"]),
        ]);
        let error = all.unwrap_err().to_string();
        assert!(error.contains("/e/x"), "a source that is not there is an error: {error}");
        fs::create_dir(at("volumes/kubernetes.io~empty-dir/e/x")).unwrap();
        let all = converted(vec![
            mount("/s", &at("volumes/kubernetes.io~secret/s"), &["rbind", "rprivate", "ro"]),
            mount("/key", &at("volumes/kubernetes.io~secret/s/..1/key"), &["rbind", "ro"]),
            mount("/e/x", &at("volumes/kubernetes.io~empty-dir/e/x"), &["rbind", "rw"]),
            mount("/dev/shm", &at("volumes/kubernetes.io~empty-dir/e"), &["rbind", "rw"]),
            mount("/dev/termination-log", &at("containers/c/0a"), &["rbind", "rw"]),
        ])
        .unwrap();
        let (secret, space) = (&all.needed[0], &all.needed[1]);
        assert_eq!(all.needed[2], *space, "one volume, in two places");
        let seen: Vec<_> = all
            .kept
            .iter()
            .map(|mount| (mount.destination().as_path(), mount.source().clone().unwrap()))
            .collect();
        assert_eq!(
            seen,
            [
                (Path::new("/s"), secret.guest_path()),
                (Path::new("/e/x"), space.guest_path().join("x")),
                (Path::new("/dev/shm"), space.guest_path()),
            ]
        );
        assert_eq!(all.kept[0].options().as_ref().unwrap(), &["rbind", "ro"]);
        let file = |path: &str| all.files.iter().find(|file| file.path == path).unwrap();
        assert_eq!(file("/key").content, b"secret");
        assert!(file("/dev/termination-log").is_message && !file("/key").is_message);
        assert_eq!(all.message, Some(at("containers/c/0a")));
    }
}
