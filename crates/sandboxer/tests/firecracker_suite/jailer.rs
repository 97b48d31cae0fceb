//! What Firecracker's own jailer promises, held by the jail of all VMMs; and both jails, compared, where `JAILER` names that program.

use std::{
    env, fs,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use sandboxer_host::network::namespace;
use sandboxer_process::{
    cgroup::{Cgroup, Hierarchies},
    confinement::Confinement,
};
use sandboxer_vmm::{VmSpec, Vmm};

use super::Firecracker;
use crate::{
    listed,
    test_guest::{Pod, vm_config},
    vmm_suite::{Case, LONG, Running, Subject, on_real},
};

/// Path of the jailer, if there is one.
const JAILER: &str = "JAILER";
/// Least user of a jail: no other is of the host.
const FIRST_USER: u32 = 0x7000_0000;

/// The process of a VMM, as `sandboxer-cli inspect` and the kernel show it.
struct Seen {
    confinement: Confinement,
    environment: Vec<String>,
    session: u32,
    /// The open files of the VMM that are directories: each would be a way out of its root.
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
pub async fn the_jail_promises_what_firecrackers_jailer_does(subject: Firecracker) -> Result<()> {
    let pod = Pod::new("jailer");
    let name = format!("sandboxer-test-{}", std::process::id());
    let cgroup = Hierarchies::detect()?.named(&name).context("no control group")?;
    cgroup.make().map_err(|(path, error)| error_at(&path, error))?;
    let spec = VmSpec { cgroup: Some(cgroup.clone()), ..pod.halting_spec() };
    let vm = subject.vmm(&pod, vm_config()).await?.boot(&spec).await?;
    let seen = Seen::read(vm.record().pid, name);
    vm.kill().await?;
    cgroup.remove().await.map_err(|(path, error)| error_at(&path, error))?;
    let seen = seen?;
    let broken = names(|is_held| !is_held(&seen));
    ensure!(broken.is_empty(), "not held: {broken:?}; seen: {:?}, {:?}", seen.confinement, seen.environment);
    // A process without a jail holds none of them, except that it may have been started in a session of its own.
    let free = Seen::read(std::process::id(), seen.group)?;
    let fulfilled = names(|is_held| is_held(&free));
    ensure!(
        fulfilled.iter().all(|promise| promise.starts_with("--daemonize")),
        "without a jail: {fulfilled:?}"
    );
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
    fn read(pid: u32, group: String) -> Result<Self> {
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
            confinement: Confinement::read(pid)?,
            environment: environment.split_terminator('\0').map(str::to_owned).collect(),
            session,
            directories: directories.count(),
            devices,
            group,
        })
    }
}

/// Returns the tests that need Firecracker's jailer.
pub fn trials() -> Vec<Trial> {
    let cases: [Case<Firecracker>; _] = listed![the_jailer_confines_no_more];
    on_real("jailer", cases, env::var_os(JAILER).is_none().then(|| "JAILER names no program".into()))
}

/// The real program in the jailer's jail, with each option that confines it more.
struct Jailed {
    pid: u32,
    groups: [Cgroup; 2],
    // Removed with it.
    _base: tempfile::TempDir,
}

impl Jailed {
    async fn start(program: &Path) -> Result<Self> {
        let base = tempfile::tempdir()?;
        let name = program.file_name().context("no name")?;
        let root = base.path().join(name).join("contract/root");
        for library in libraries(program)? {
            let at = root.join(library.strip_prefix("/")?);
            fs::create_dir_all(at.parent().context("no directory")?)?;
            fs::copy(library, at)?;
        }
        let parent = format!("sandboxer-jailer-{}", std::process::id());
        let hierarchies = Hierarchies::detect()?;
        let group = |name: &str| hierarchies.named(name).context("no control group");
        let groups = [group(&format!("{parent}/contract"))?, group(&parent)?];
        let network = namespace::fresh()?;
        let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let ran = Command::new(env::var_os(JAILER).context("no jailer")?)
            .args(["--id", "contract", "--uid", "1879048191", "--gid", "1879048191", "--new-pid-ns"])
            .args(["--cgroup-version", if unified { "2" } else { "1" }, "--cgroup", "pids.max=64"])
            .args(["--parent-cgroup", &parent, "--chroot-base-dir"])
            .arg(base.path())
            .arg("--netns")
            .arg(format!("/proc/{}/fd/{}", std::process::id(), network.as_raw_fd()))
            .arg("--exec-file")
            .arg(program)
            .args(["--", "--api-sock", "/run/api.sock"])
            .status()?;
        ensure!(ran.success(), "the jailer: {ran}");
        let pid = fs::read_to_string(root.join(name).with_extension("pid"))?.parse()?;
        let jailed = Self { pid, groups, _base: base };
        // Its own filters are set before it listens.
        let listens = async {
            while !root.join("run/api.sock").exists() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LONG, listens).await.context("it does not listen")?;
        Ok(jailed)
    }

    async fn end(self) -> Result<()> {
        kill(Pid::from_raw(self.pid.try_into()?), Signal::SIGKILL)?;
        for group in self.groups {
            group.remove().await.map_err(|(path, error)| error_at(&path, error))?;
        }
        Ok(())
    }
}

/// Returns the libraries of a program; a static one has none.
fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = String::from_utf8(Command::new("ldd").arg(program).output()?.stdout)?;
    Ok(output.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

/// Compares, of the same program, what `sandboxer-cli inspect` shows.
async fn the_jailer_confines_no_more(subject: Firecracker) -> Result<()> {
    let Firecracker::Real(program) = &subject else { anyhow::bail!("a double has no jailer") };
    let jailed = Jailed::start(program).await?;
    let running = Running::start(&subject).await?;
    let (ours, theirs) = (Confinement::read(running.vm.record().pid)?, Confinement::read(jailed.pid)?);
    running.end().await?;
    jailed.end().await?;
    println!("ours: {ours:?}\nthe jailer's: {theirs:?}");
    ensure!(theirs.uid != 0 && ours.uid != 0 && ours.gid != 0, "root");
    ensure!(ours.groups.len() <= 1, "more than the group of /dev/kvm: {:?}", ours.groups);
    for namespace in &theirs.own_namespaces {
        ensure!(ours.own_namespaces.contains(namespace), "{namespace} is the host's");
    }
    ensure!(ours.capabilities & !theirs.capabilities == 0, "capabilities: {:x}", ours.capabilities);
    ensure!(ours.capability_bounds & !theirs.capability_bounds == 0, "bounds: {:x}", ours.capability_bounds);
    ensure!(ours.no_new_privileges || !theirs.no_new_privileges, "no_new_privs");
    ensure!(ours.seccomp == "filter" && ours.seccomp_filters > theirs.seccomp_filters, "filters");
    ensure!(ours.root.starts_with("tmpfs ro"), "its root can be written: {}", ours.root);
    // Without these, the jailer was not asked for all, and the comparison says less than it seems to.
    for namespace in ["mnt", "net", "pid"] {
        ensure!(theirs.own_namespaces.iter().any(|own| own == namespace), "the jailer made no {namespace}");
    }
    ensure!(theirs.cgroup.ends_with("/contract"), "the jailer made no control group: {}", theirs.cgroup);
    Ok(())
}
