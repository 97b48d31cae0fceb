//! Translates a container's mounts for its guest.

use std::{
    collections::HashMap,
    net::IpAddr,
    path::{Path, PathBuf},
};

use oci_spec::runtime::{Mount, MountBuilder};
use sandboxer_host::{
    helper::Helpers,
    volume::{Bound, Kind, Looked, Needed, Volume, VolumeError},
};
use sandboxer_protocol::{IMAGE_VOLUME, PROTOCOL_VERSION, agent::File, id::ContainerId, newer};
use sandboxer_share::attach::Access;

use super::{
    devices,
    spec::{invalid, unsupported},
};
use crate::{error::PodError, pod::spec::PodSpec, share::Share};

/// File systems that a guest mounts by itself.
const GUEST_FILE_SYSTEMS: [&str; 7] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2"];

/// Options of an image volume that mean the same in a guest.
const IMAGE_VOLUME_OPTIONS: [&str; 4] = ["bind", "rbind", "ro", "rw"];

/// Memory shared by all containers of a pod, unless one of them has a volume there.
const SHARED_MEMORY: &str = "/dev/shm";

/// A container's mounts by kind.
#[derive(Debug, Default)]
pub struct Mounts {
    /// Mounts that the guest's runtime performs.
    pub guest_mounts: Vec<Mount>,
    /// Files copied into the container.
    pub files: Vec<File>,
    /// Volumes that the guest must have first.
    pub needed: Vec<Needed>,
    /// The live shares of the guest.
    pub shares: Vec<Share>,
    /// Path of the container's termination message on the host.
    pub message: Option<PathBuf>,
    /// Whether the image has volumes, which are on the container's disk.
    pub has_image_volumes: bool,
}

/// Sources of bind mounts, by their index in the container's mounts.
pub type AllLooked = HashMap<usize, Looked>;

/// Reads the sources of a container's bind mounts in helper processes; those of its image's volumes unless these are
/// `on_disk`.
pub async fn look(
    helpers: &Helpers,
    pod: &PodSpec,
    container: &ContainerId,
    mounts: &[Mount],
    on_disk: bool,
) -> Result<AllLooked, PodError> {
    let helpers = helpers.on_behalf_of(&pod.uid);
    let mut looked = AllLooked::new();
    let binds = mounts.iter().enumerate().filter(|(_, mount)| is_looked_at(pod, mount));
    let is_on_disk = |mount: &Mount| on_disk && is_image_volume(container, mount);
    for (at, mount) in binds.filter(|(_, mount)| !is_on_disk(mount)) {
        looked.insert(at, helpers.look(&pod.id, mount).await.map_err(VolumeError::from)?);
    }
    Ok(looked)
}

/// Returns the share of the directory of the host that is the root file system of `container`.
pub async fn root(
    helpers: &Helpers,
    pod: &PodSpec,
    container: &ContainerId,
    root: &Path,
) -> Result<Share, PodError> {
    let options = ["rbind", "rw"].map(str::to_owned).to_vec();
    let mount = bind(container, Path::new("/"), root.to_owned(), options)?;
    let looked = helpers.on_behalf_of(&pod.uid).look(&pod.id, &mount).await.map_err(VolumeError::from)?;
    let mut all = Mounts::default();
    all.bind(pod, container, looked)?;
    all.shares
        .pop()
        .ok_or_else(|| invalid(container, format!("its root file system {root:?} is not a directory")))
}

/// Reads the sources of bind mounts of the pod of `kubelet` in this thread; for sources that cannot hang.
#[cfg(any(test, fuzzing))]
pub fn looked_at(
    pod: &PodSpec,
    kubelet: &sandboxer_host::volume::Kubelet,
    mounts: &[Mount],
) -> Result<AllLooked, PodError> {
    let binds = mounts.iter().enumerate().filter(|(_, mount)| is_looked_at(pod, mount));
    Ok(binds.map(|(at, mount)| Ok((at, Looked::at(mount, kubelet)?))).collect::<Result<_, VolumeError>>()?)
}

/// Returns whether a mount's source is a path.
fn is_looked_at(pod: &PodSpec, mount: &Mount) -> bool {
    let fstype = mount.typ().as_deref().unwrap_or("");
    is_bind(mount)
        && !is_the_pods_shared_memory(pod, mount)
        && !GUEST_FILE_SYSTEMS.contains(&fstype)
        && device(mount).is_none()
}

/// Returns whether a mount is a volume of the container's image. containerd creates a directory for it in its own,
/// `…/containers/<id>/volumes/<random>`, with the content of the image. Nobody knows the container's id before, so no
/// pod can name such a path.
fn is_image_volume(container: &ContainerId, mount: &Mount) -> bool {
    let mut parts = mount.source().iter().flat_map(|source| source.iter()).rev();
    is_bind(mount)
        && mount.source().as_deref().is_some_and(Path::is_absolute)
        && parts.next().is_some()
        && parts.next().is_some_and(|part| part == "volumes")
        && parts.next().is_some_and(|part| part == container.as_str())
        && parts.next().is_some_and(|part| part == "containers")
}

/// Returns the guest's path of the device that a bind mount provides, if every kernel has it.
fn device(mount: &Mount) -> Option<&'static Path> {
    devices::mounted(mount.source().as_deref().filter(|_| is_bind(mount))?)
}

/// Sorts the mounts of `container`, whose bind mounts are in `looked`; rejects unsupported mounts by name. Volumes of
/// the image are on the container's disk if they are to be `on_disk`, else live shares of containerd's directory.
pub fn convert(
    pod: &PodSpec,
    container: &ContainerId,
    mounts: Vec<Mount>,
    mut looked: AllLooked,
    on_disk: bool,
) -> Result<Mounts, PodError> {
    let mut all = Mounts { files: files(pod), ..Default::default() };
    for (at, mount) in mounts.into_iter().enumerate() {
        let fstype = mount.typ().as_deref().unwrap_or("");
        let mapped = |ids: &Option<Vec<_>>| ids.as_ref().is_some_and(|ids| !ids.is_empty());
        if mapped(mount.uid_mappings()) || mapped(mount.gid_mappings()) {
            let what = format!("volume {} with mapped ids", mount.destination().display());
            return Err(unsupported(container, &what, "a guest has the host's ids"));
        }
        let is_its_own = pod.alone && !is_bind(&mount);
        if is_the_pods_shared_memory(pod, &mount) && !is_its_own {
            // Mounted below, in the guest.
        } else if GUEST_FILE_SYSTEMS.contains(&fstype) {
            all.guest_mounts.push(mount);
        } else if on_disk && is_image_volume(container, &mount) {
            let options = mount.options().iter().flatten();
            let usable = options.filter(|option| IMAGE_VOLUME_OPTIONS.contains(&option.as_str())).cloned();
            all.guest_mounts.push(bind(
                container,
                mount.destination(),
                IMAGE_VOLUME.into(),
                usable.collect(),
            )?);
            all.has_image_volumes = true;
        } else if let Some(node) = device(&mount) {
            let read_only = mount.options().iter().flatten().any(|option| option == "ro");
            let access = if read_only { "ro" } else { "rw" };
            let options = vec!["bind".to_owned(), access.to_owned()];
            all.guest_mounts.push(bind(container, mount.destination(), node.to_owned(), options)?);
        } else if let Some(looked) = looked.remove(&at) {
            all.bind(pod, container, looked)?;
        } else {
            let what = format!("volume {} (of type {fstype:?})", mount.destination().display());
            return Err(unsupported(container, &what, "it is none that a guest can mount by itself"));
        }
    }
    if !all.guest_mounts.iter().any(|mount| mount.destination() == Path::new(SHARED_MEMORY)) {
        let options = ["rbind", "rw", "nosuid", "nodev", "noexec"].map(str::to_owned).to_vec();
        let mount = bind(container, SHARED_MEMORY.as_ref(), SHARED_MEMORY.into(), options)?;
        // As containerd sorts all of them: beneath whatever has a deeper target.
        let depth = |mount: &Mount| mount.destination().components().count();
        let last = all.guest_mounts.iter().rposition(|other| depth(other) <= depth(&mount));
        all.guest_mounts.insert(last.map_or(0, |last| last + 1), mount);
    }
    Ok(all)
}

impl Mounts {
    fn bind(
        &mut self,
        pod: &PodSpec,
        container: &ContainerId,
        Looked { bound: Bound { volume, file, inode, is_one_mount }, content, source: found }: Looked,
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
            // Files are copied.
            Kind::File | Kind::TerminationMessage => {}
            Kind::Projected | Kind::ProjectedPart | Kind::EmptyDir(_) => {
                if let Some((needed, at)) = volume.needed() {
                    self.guest_mounts.push(bind(container, &volume.at, at, volume.options)?);
                    self.needed.push(needed);
                }
            }
            Kind::Live => {
                let Volume { at, source, read_only, follows_host_mounts, mut options, .. } = volume;
                let access = match read_only {
                    false => Access::ReadWrite,
                    true if options.iter().any(|option| option == "rro") => Access::RecursivelyReadOnly,
                    true => {
                        // Enforced on the host. A container may write to mounts of the host below this one, which are
                        // one with it for the guest.
                        if !is_one_mount {
                            options.retain(|option| option != "ro");
                        }
                        Access::ReadOnly
                    }
                };
                let found = found.ok_or_else(|| std::io::ErrorKind::NotFound.into());
                let share =
                    found.and_then(|found| Share::new(&source, found, inode, access, follows_host_mounts));
                let share = share.map_err(|error| PodError::Path {
                    pod: pod.id.clone(),
                    action: "look at",
                    path: source,
                    source: error,
                })?;
                self.guest_mounts.push(bind(container, &at, share.guest_path(), options)?);
                self.shares.push(share);
            }
        }
        Ok(())
    }

    /// Adds a file to copy; replaces an earlier one with the same path.
    fn copy(&mut self, file: File) {
        self.files.retain(|other| other.path != file.path);
        self.files.push(file);
    }
}

/// Returns whether this is containerd's or CRI-O's mount at /dev/shm: a tmpfs, the host's own, or the one created for the
/// pod on the host, `…/sandboxes/<id>/shm` or in the bundle of CRI-O's sandbox container.
fn is_the_pods_shared_memory(pod: &PodSpec, mount: &Mount) -> bool {
    let source = mount.source().as_deref().unwrap_or(Path::new(""));
    let in_bundle = |bundle: &Path| pod.is_of_cri_o() && source == bundle.join("shm");
    let of_a_pod =
        source.ends_with("shm") && source.iter().rev().nth(2).is_some_and(|dir| dir == "sandboxes");
    let of_containerd = !is_bind(mount)
        || source == Path::new(SHARED_MEMORY)
        || of_a_pod
        || pod.bundle.as_deref().is_some_and(in_bundle);
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
    let unlisted = newer::in_source(&source, PROTOCOL_VERSION);
    debug_assert!(unlisted.is_none(), "{source:?}: list this kind of mount in protocol/newer.rs");
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

/// Returns `/etc/hosts` as kubelet writes it, which it does only for its own pods.
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

    use sandboxer_host::volume::Kubelet;

    use super::*;
    use crate::pod::journal::tests::record;

    fn mount(at: &str, source: &Path, options: &[&str]) -> Mount {
        let options = options.iter().map(|&option| option.to_owned()).collect::<Vec<_>>();
        MountBuilder::default().destination(at).typ("bind").source(source).options(options).build().unwrap()
    }

    fn converted(mounts: Vec<Mount>) -> Result<Mounts, PodError> {
        converted_at(Path::new("/nowhere"), mounts)
    }

    /// Converts mounts of the pod with uid "u", whose kubelet has this root directory.
    fn converted_at(root: &Path, mounts: Vec<Mount>) -> Result<Mounts, PodError> {
        let pod = record("p").spec;
        let looked = looked_at(&pod, &Kubelet { root: root.to_owned(), uid: "u".to_owned() }, &mounts)?;
        convert(&pod, &"c".parse().unwrap(), mounts, looked, true)
    }

    #[test]
    fn a_mount_with_mapped_ids_is_refused_by_name() {
        let mut mapped = mount("/data", Path::new("/srv"), &["rbind"]);
        mapped.set_uid_mappings(Some(vec![oci_spec::runtime::LinuxIdMapping::default()]));
        let error = converted(vec![mapped]).unwrap_err().to_string();
        assert!(error.contains("volume /data with mapped ids"), "{error}");
    }

    #[test]
    fn a_volume_of_the_image_is_on_the_containers_disk_and_no_other_path_is_one() {
        let pod = record("p").spec;
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("containers/c/volumes/0a");
        let all = |source: &Path, on_disk| {
            let mounts = vec![mount("/data", source, &["rbind", "rprivate", "rw"])];
            let kubelet = Kubelet { root: dir.path().into(), uid: "u".to_owned() };
            let is_own = on_disk && source == own;
            let looked = if is_own { AllLooked::new() } else { looked_at(&pod, &kubelet, &mounts).unwrap() };
            convert(&pod, &"c".parse().unwrap(), mounts, looked, on_disk).unwrap()
        };
        let on_disk = all(&own, true);
        assert!(on_disk.has_image_volumes && on_disk.shares.is_empty());
        assert_eq!(on_disk.guest_mounts[0].source().as_deref(), Some(Path::new(IMAGE_VOLUME)));
        assert_eq!(on_disk.guest_mounts[0].options().clone().unwrap(), ["rbind", "rw"]);
        for other in ["containers/d/volumes/0a", "containers/c/volumes", "c/volumes/0a"] {
            let other = dir.path().join(other);
            fs::create_dir_all(&other).unwrap();
            let shared = all(&other, true);
            assert!(!shared.has_image_volumes && shared.shares.len() == 1, "{other:?}");
        }
        // As for an agent that does not know such mounts.
        fs::create_dir_all(&own).unwrap();
        let shared = all(&own, false);
        assert!(!shared.has_image_volumes && shared.shares.len() == 1);
        assert_eq!(shared.guest_mounts[0].source().clone().unwrap(), shared.shares[0].guest_path());
    }

    #[test]
    fn a_host_directory_is_shared_and_mounted_from_where_the_guest_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let all = converted(vec![mount("/data", dir.path(), &["rbind", "ro", "rslave"])]).unwrap();
        let found = fs::metadata(dir.path()).unwrap();
        let inode = (found.dev(), found.ino());
        let opened = fs::File::open(dir.path()).unwrap().into();
        let share = Share::new(dir.path(), opened, inode, Access::ReadOnly, true).unwrap();
        assert_eq!(all.shares[0].guest_path(), share.guest_path());
        let data = all.guest_mounts.iter().find(|mount| mount.destination() == Path::new("/data")).unwrap();
        assert_eq!(data.source().clone(), Some(all.shares[0].guest_path()));
        assert_eq!(data.options().clone().unwrap(), ["rbind"], "the host holds it to that");
        let all = converted(vec![mount("/data", dir.path(), &["rbind", "ro", "rprivate"])]).unwrap();
        let data = all.guest_mounts.iter().find(|mount| mount.destination() == Path::new("/data")).unwrap();
        assert_eq!(data.options().clone().unwrap(), ["rbind", "ro"], "nothing below it can be written to");
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
            let mounts = converted_at(dir.path(), mounts).unwrap().guest_mounts;
            let mut found = mounts.iter().filter(|mount| mount.destination() == Path::new("/dev/shm"));
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
    fn shared_memory_of_cri_o_is_in_the_bundle_of_its_sandbox_container() {
        let dir = Path::new("/run/containers/storage/overlay-containers/p/userdata");
        let pod = PodSpec { bundle: Some(dir.to_owned()), ..record("p").spec };
        let is_its = |source: &Path| is_the_pods_shared_memory(&pod, &mount("/dev/shm", source, &["bind"]));
        assert!(is_its(&dir.join("shm")));
        assert!(!is_its("/run/containers/storage/overlay-containers/q/userdata/shm".as_ref()));
        assert!(!is_its("/srv/shm".as_ref()));
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
        let all = converted_at(
            dir.path(),
            vec![mount("/e/x", &at("volumes/kubernetes.io~empty-dir/x"), &["rbind", "rw"])],
        );
        let error = all.unwrap_err().to_string();
        assert!(error.contains("/e/x"), "a source that is not there is an error: {error}");
        let all = converted_at(
            dir.path(),
            vec![
                mount("/s", &at("volumes/kubernetes.io~secret/s"), &["rbind", "rprivate", "ro"]),
                mount("/e", &at("volumes/kubernetes.io~empty-dir/e"), &["rbind", "rw"]),
                mount("/dev/shm", &at("volumes/kubernetes.io~empty-dir/e"), &["rbind", "rw"]),
                mount("/dev/termination-log", &at("containers/c/0a"), &["rbind", "rw"]),
            ],
        )
        .unwrap();
        let (secret, space) = (&all.needed[0], &all.needed[1]);
        assert_eq!(all.needed[2], *space, "one volume, in two places");
        let seen: Vec<_> = all
            .guest_mounts
            .iter()
            .map(|mount| (mount.destination().as_path(), mount.source().clone().unwrap()))
            .collect();
        assert_eq!(
            seen,
            [
                (Path::new("/s"), secret.guest_path()),
                (Path::new("/e"), space.guest_path()),
                (Path::new("/dev/shm"), space.guest_path()),
            ]
        );
        assert_eq!(all.guest_mounts[0].options().as_ref().unwrap(), &["rbind", "ro"]);
        let file = |path: &str| all.files.iter().find(|file| file.path == path).unwrap();
        assert!(file("/dev/termination-log").is_message && !file("/etc/hosts").is_message);
        assert_eq!(all.message, Some(at("containers/c/0a")));
    }
}
