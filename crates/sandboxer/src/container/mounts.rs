//! A container's mounts as its guest can make them.

use std::{
    io::Read,
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use oci_spec::runtime::{Mount, MountBuilder};
use sandboxer_protocol::{agent::File, id::ContainerId};
use sandboxer_share::attach::Access;

use super::spec::{invalid, unsupported};
use crate::{
    error::PodError,
    host::{
        share::Share,
        volume::{self, Kind, Needed, Volume},
    },
    pod::spec::PodSpec,
};

/// Largest host file that is copied into a container, bytes.
const MAX_FILE: u64 = 1 << 20;

/// File systems that a guest makes by itself.
const GUEST_FILE_SYSTEMS: [&str; 7] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"];

/// One for all containers of a pod, unless one of them has a volume there.
const SHARED_MEMORY: &str = "/dev/shm";

/// What of a container's mounts goes where.
#[derive(Debug, Default)]
pub struct Mounts {
    /// Made by the guest's runtime.
    pub kept: Vec<Mount>,
    /// Copied into the container.
    pub files: Vec<File>,
    /// What the guest must have before.
    pub needed: Vec<Needed>,
    /// What the guest has of the host's own files.
    pub shares: Vec<Share>,
    /// The host's file for the container's termination message.
    pub message: Option<PathBuf>,
}

/// Sorts the mounts of `container`; what can't be had is refused by name.
pub fn convert(pod: &PodSpec, container: &ContainerId, mounts: Vec<Mount>) -> Result<Mounts, PodError> {
    let mut all = Mounts { files: files(pod), ..Default::default() };
    for mount in mounts {
        let fstype = mount.typ().as_deref().unwrap_or("");
        if is_the_pods_shared_memory(&mount) {
            // Below, in the guest.
        } else if GUEST_FILE_SYSTEMS.contains(&fstype) {
            all.kept.push(mount);
        } else if is_bind(&mount) {
            all.bind(pod, container, volume::classify(&mount)?)?;
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
    fn bind(&mut self, pod: &PodSpec, container: &ContainerId, volume: Volume) -> Result<(), PodError> {
        match &volume.kind {
            Kind::File => self.copy(copy_in(pod, container, &volume)?),
            Kind::ProjectedPart if volume.source.is_file() => self.copy(copy_in(pod, container, &volume)?),
            Kind::TerminationMessage => {
                self.copy(File { is_message: true, ..copy_in(pod, container, &volume)? });
                self.message = Some(volume.source);
            }
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
                        // The host holds it to that, and to no more; to the guest it is one mount with all below.
                        options.retain(|option| option != "ro");
                        Access::ReadOnly
                    }
                };
                let share = Share::of(&source, access, follows_host_mounts).map_err(|error| {
                    PodError::Host { pod: pod.id.clone(), action: "look at", path: source, source: error }
                })?;
                self.kept.push(bind(container, &at, share.guest_path(), options)?);
                self.shares.push(share);
            }
        }
        Ok(())
    }

    /// The last one for a path counts.
    fn copy(&mut self, file: File) {
        self.files.retain(|other| other.path != file.path);
        self.files.push(file);
    }
}

/// Whether this is what containerd mounts at /dev/shm: a tmpfs, the host's own, or that which it made for the
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

/// As kubelet writes it, which it does only for pods of its own.
fn hosts(pod: &PodSpec) -> String {
    let mut text = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n".to_owned();
    let alone = [IpAddr::from([127, 0, 1, 1])];
    for ip in if pod.ips.is_empty() { &alone[..] } else { &pod.ips } {
        text += &format!("{ip}\t{}\n", pod.hostname);
    }
    text
}

fn copy_in(pod: &PodSpec, container: &ContainerId, volume: &Volume) -> Result<File, PodError> {
    let Volume { at, source, read_only, .. } = volume;
    let path = at.to_string_lossy().into_owned();
    let read = || {
        let file = std::fs::File::open(source)?;
        let meta = file.metadata()?;
        let mut content = Vec::new();
        // The file may grow: the bound holds all the same, and one byte more tells.
        file.take(MAX_FILE + 1).read_to_end(&mut content)?;
        Ok((meta, content))
    };
    let (meta, content) = read().map_err(|error| PodError::Host {
        pod: pod.id.clone(),
        action: "read",
        path: source.clone(),
        source: error,
    })?;
    if content.len() as u64 > MAX_FILE {
        let length = meta.len();
        return Err(invalid(
            container,
            format!("{source:?} for {path} has {length} bytes, at most {MAX_FILE} are taken"),
        ));
    }
    Ok(File {
        path,
        content,
        mode: meta.mode() & 0o7777,
        uid: meta.uid(),
        gid: meta.gid(),
        read_only: *read_only,
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::pod::journal::tests::record;

    fn mount(at: &str, source: &Path, options: &[&str]) -> Mount {
        let options = options.iter().map(|&option| option.to_owned()).collect::<Vec<_>>();
        MountBuilder::default().destination(at).typ("bind").source(source).options(options).build().unwrap()
    }

    fn converted(mounts: Vec<Mount>) -> Result<Mounts, PodError> {
        convert(&record("p").spec, &"c".parse().unwrap(), mounts)
    }

    #[test]
    fn a_host_directory_is_shared_and_mounted_from_where_the_guest_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let all = converted(vec![mount("/data", dir.path(), &["rbind", "ro", "rslave"])]).unwrap();
        assert_eq!(all.shares, [Share::of(dir.path(), Access::ReadOnly, true).unwrap()]);
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
