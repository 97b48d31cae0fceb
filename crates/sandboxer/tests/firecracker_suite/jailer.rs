//! What Firecracker's own jailer promises, held by the jail of all VMMs.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use sandboxer_process::{cgroup::Hierarchies, confinement::Confinement};
use sandboxer_vmm::{VmSpec, Vmm};

use super::Subject;
use crate::test_guest::Pod;

/// Least user of a jail: no other is of the host.
const FIRST_USER: u32 = 0x7000_0000;

/// The process of a VMM, as `sandboxer-cli inspect` and the kernel show it.
struct Seen {
    confinement: Confinement,
    environment: Vec<String>,
    session: u32,
    /// Its open files that are directories: each would be a way out of its root.
    directories: usize,
    devices: Vec<String>,
    /// The control group that was asked for.
    group: String,
}

/// A promise of the jailer (v1.16, its documentation), and whether the process shows it. What it only does when it is asked to has
/// the option's name.
type Promise = (&'static str, fn(&Seen) -> bool);

const PROMISES: [Promise; 10] = [
    ("--uid, --gid: a user and a group that are not root", |seen| {
        seen.confinement.uid >= FIRST_USER && seen.confinement.gid >= FIRST_USER
    }),
    ("a mount namespace of its own", |seen| has_own(seen, "mnt")),
    ("a root of its own, in which the host's is not", |seen| seen.confinement.root.starts_with("tmpfs ")),
    ("--new-pid-ns: a process namespace of its own", |seen| has_own(seen, "pid")),
    ("--netns: a network namespace that is not the host's", |seen| has_own(seen, "net")),
    ("--cgroup: a control group of its own", |seen| seen.confinement.cgroup.ends_with(&seen.group)),
    ("seccomp: filters", |seen| seen.confinement.seccomp == "filter" && seen.confinement.no_new_privileges),
    ("no variable of the caller's environment", |seen| {
        let ours = ["PATH=", "SANDBOXER_"];
        seen.environment.iter().all(|variable| ours.iter().any(|name| variable.starts_with(name)))
    }),
    ("no open file of the caller's, and devices only as they are needed", |seen| {
        seen.directories == 0 && seen.devices == ["kvm", "null", "urandom"]
    }),
    ("--daemonize: a session of its own", |seen| seen.session == seen.confinement.pid),
];

fn has_own(seen: &Seen, namespace: &str) -> bool {
    seen.confinement.own_namespaces.iter().any(|own| own == namespace)
}

/// What the jailer promises is the least that our jail does.
pub async fn the_jail_promises_what_firecrackers_jailer_does(subject: Subject) -> Result<()> {
    let pod = Pod::new("jailer");
    let name = format!("sandboxer-test-{}", std::process::id());
    let cgroup = Hierarchies::detect()?.named(&name).context("no control group")?;
    cgroup.make().map_err(|(path, error)| error_at(&path, error))?;
    let spec = VmSpec { cgroup: Some(cgroup.clone()), ..pod.halting_spec() };
    let vm = subject.vmm(&pod).await?.boot(&spec).await?;
    let seen = Seen::of(vm.record().pid, name);
    vm.kill().await?;
    cgroup.remove().await.map_err(|(path, error)| error_at(&path, error))?;
    let seen = seen?;
    let broken = names(|is_held| !is_held(&seen));
    ensure!(broken.is_empty(), "not held: {broken:?}; seen: {:?}, {:?}", seen.confinement, seen.environment);
    // A process without a jail holds none of them, except that it may have been started in a session of its own.
    let free = Seen::of(std::process::id(), seen.group)?;
    let held = names(|is_held| is_held(&free));
    ensure!(held.iter().all(|promise| promise.starts_with("--daemonize")), "without a jail: {held:?}");
    Ok(())
}

/// Returns the names of the promises that `test` selects.
fn names(test: impl Fn(fn(&Seen) -> bool) -> bool) -> Vec<&'static str> {
    PROMISES.iter().filter(|(_, is_held)| test(*is_held)).map(|(promise, _)| *promise).collect()
}

fn error_at(path: &Path, error: std::io::Error) -> anyhow::Error {
    anyhow::Error::new(error).context(path.display().to_string())
}

impl Seen {
    fn of(pid: u32, group: String) -> Result<Self> {
        let proc = Path::new("/proc").join(pid.to_string());
        let environment = fs::read_to_string(proc.join("environ"))?;
        let stat = fs::read_to_string(proc.join("stat"))?;
        // State, parent, process group, session; the name before them may contain anything.
        let (_, fields) = stat.rsplit_once(") ").context("a malformed stat")?;
        let session = fields.split(' ').nth(3).context("no session")?.parse()?;
        let open = fs::read_dir(proc.join("fd"))?.flatten();
        let directories = open.filter(|file| fs::metadata(file.path()).is_ok_and(|file| file.is_dir()));
        let mut devices = fs::read_dir(proc.join("root/dev"))?
            .map(|device| Ok(device?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<Vec<_>>>()?;
        devices.sort();
        Ok(Self {
            confinement: Confinement::of(pid)?,
            environment: environment.split_terminator('\0').map(str::to_owned).collect(),
            session,
            directories: directories.count(),
            devices,
            group,
        })
    }
}
