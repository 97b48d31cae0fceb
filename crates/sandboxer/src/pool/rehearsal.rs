//! A container that is made, run and removed in a machine before the machine waits.
//!
//! What a guest does for the first time is slow: an emulated one has the code translated first, and any
//! restored one gets its own copies of the pages it writes. Measured under emulation: making the first
//! container of a guest takes five times as long as making the second. So the first is this one. It goes the
//! way of every container, prints one line and leaves nothing.

use std::{
    fs, io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use nix::{errno::Errno, sys::stat::Mode, unistd::mkfifo};
use oci_spec::runtime::Spec;
use sandboxer_protocol::{
    agent as wire,
    id::{ContainerId, SandboxId},
};

use crate::{
    config::Way,
    container::{
        NewContainer, StdioPaths,
        io::Subject,
        start::{self, Live, Means},
    },
    error::PodError,
    front::Front,
    host::{rootfs::Mount, share::Shares},
    pod::{Node, spec::PodSpec, stages::Stages, volumes::Volumes},
};

const PROGRAM: &str = "rehearsal";
const STDOUT: &str = "stdout";

/// Where the program is loaded: where linkers put programs that care.
const BASE: u64 = 0x40_0000;
const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;

/// `write(1, "\n", 1); exit(0)` for Linux on x86-64.
const CODE: [u8; 28] = [
    0xb8, 1, 0, 0, 0, // mov eax, SYS_write
    0x89, 0xc7, // mov edi, eax
    0x48, 0x8d, 0x35, 13, 0, 0, 0, // lea rsi, [rip + 13]
    0x89, 0xc2, // mov edx, eax
    0x0f, 0x05, // syscall
    0xb8, 60, 0, 0, 0, // mov eax, SYS_exit
    0x31, 0xff, // xor edi, edi
    0x0f, 0x05, // syscall
    b'\n',
];

/// A bundle and an image on the host.
#[derive(Debug)]
pub struct Rehearsal {
    bundle: PathBuf,
    image: Mount,
}

impl Rehearsal {
    /// Prepares both below the state directory.
    pub fn new(state_dir: &Path) -> io::Result<Self> {
        let bundle = state_dir.join("rehearsal");
        let within = |name: &str| bundle.join(name);
        for name in ["lower", "upper", "work"] {
            fs::create_dir_all(within(name))?;
        }
        let path = within("lower").join(PROGRAM);
        if !path.exists() {
            // Not written again: the image made of it is known by the time of its last change.
            let mut file = fs::File::options().write(true).create_new(true).mode(0o755).open(path)?;
            io::Write::write_all(&mut file, &program())?;
        }
        match mkfifo(&within(STDOUT), Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut spec = Spec::default();
        if let Some(process) = spec.process_mut() {
            process.set_args(Some(vec![format!("/{PROGRAM}")]));
        }
        fs::write(within("config.json"), serde_json::to_vec(&spec)?)?;
        let image = Mount {
            fstype: "overlay".into(),
            source: "overlay".into(),
            options: [("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work")]
                .map(|(option, name)| format!("{option}={}", within(name).display()))
                .to_vec(),
        };
        Ok(Self { bundle, image })
    }

    /// Makes the container in a machine, lets it run and removes it.
    pub async fn run(&self, node: &Arc<Node>, id: &SandboxId, live: &Live) -> Result<(), PodError> {
        let container: ContainerId = id.clone();
        let pod = PodSpec {
            id: id.clone(),
            name: id.to_string(),
            namespace: String::new(),
            uid: String::new(),
            hostname: id.to_string(),
            netns: None,
            ips: Vec::new(),
            resolv_conf: None,
            shared_pids: false,
            cgroup_parent: String::new(),
            sysctls: Default::default(),
            way: Way::Pool,
            vcpus: 0,
            memory_mib: 0,
            host_ports: Vec::new(),
            limits: Default::default(),
            room: Default::default(),
        };
        let new = NewContainer {
            id: container.clone(),
            bundle: self.bundle.clone(),
            mounts: vec![self.image.clone()],
            stdio: StdioPaths { stdout: self.bundle.join(STDOUT), ..StdioPaths::default() },
            beside: Vec::new(),
        };
        // Not among the times of pods.
        let stages = Stages::new(id.clone(), Arc::default());
        let shares = Shares::new(id.clone(), self.bundle.clone(), 0, None);
        let volumes = Volumes::new(node.volumes.clone(), shares, None);
        let means = Means { front: &Front::none(), rootfs: &node.rootfs, volumes: &volumes, stages: &stages };
        let created = start::create(&pod, live, means, &new).await?;
        let subject = Subject { container: container.clone(), exec: None };
        let (running, _) = created.io.run(&live.agent, &subject, false);
        start::release(live, &subject).await?;
        let exit = start::follow(live, &subject, running, None).await;
        if exit.code != 0 {
            let reason = format!("it ended with code {} {}", exit.code, exit.reason);
            return Err(PodError::Failed { subject: format!("rehearsal in {id}"), reason });
        }
        start::delete(live, &container, &created.disks).await
    }
}

/// Interfaces such as pods have, for a machine with so many. Nobody is reached by them.
pub fn interfaces(nics: u8) -> Vec<wire::Interface> {
    // Of documentation's network, and its first address.
    let (network, router) = (vec![192, 0, 2, 0], vec![192, 0, 2, 1]);
    let interface = |nic: u8| wire::Interface {
        nic: nic.into(),
        name: format!("eth{nic}"),
        mac: vec![0x02, 0, 0, 0, 0, nic],
        mtu: 1400,
        addresses: vec![wire::Address {
            ip: vec![192, 0, 2, 2 + nic],
            prefix_length: 24,
            ..Default::default()
        }],
        routes: vec![
            wire::Route {
                destination: network.clone(),
                prefix_length: 24,
                scope: libc::RT_SCOPE_LINK.into(),
                ..Default::default()
            },
            wire::Route { destination: vec![0; 4], gateway: router.clone(), ..Default::default() },
        ],
        ..Default::default()
    };
    (0..nics).map(interface).collect()
}

/// The smallest program there is: an ELF file of one segment that holds all of it.
fn program() -> Vec<u8> {
    let size = (ELF_HEADER + PROGRAM_HEADER + CODE.len()) as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let entry = BASE + (ELF_HEADER + PROGRAM_HEADER) as u64;
    // Executable, x86-64, version 1.
    elf.extend([2_u16.to_le_bytes(), 62_u16.to_le_bytes()].concat());
    elf.extend(1_u32.to_le_bytes());
    elf.extend([entry, ELF_HEADER as u64, 0].map(u64::to_le_bytes).concat());
    elf.extend(0_u32.to_le_bytes());
    // One program header, no section.
    elf.extend([ELF_HEADER as u16, PROGRAM_HEADER as u16, 1, 0, 0, 0].map(u16::to_le_bytes).concat());
    // A segment to load, to read and to execute.
    elf.extend([1_u32.to_le_bytes(), 5_u32.to_le_bytes()].concat());
    elf.extend([0, BASE, BASE, size, size, 0x1000].map(u64::to_le_bytes).concat());
    elf.extend(CODE);
    elf
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_program_prints_a_line_and_ends_well() {
        let dir = tempfile::tempdir().unwrap();
        let rehearsal = Rehearsal::new(dir.path()).unwrap();
        let path = rehearsal.bundle.join("lower").join(PROGRAM);
        // Run as a copy made by another process: this one may have forked with it open for writing.
        let copy = dir.path().join("program");
        assert!(std::process::Command::new("cp").args([&path, &copy]).status().unwrap().success());
        let output = std::process::Command::new(copy).output().unwrap();
        assert_eq!((output.stdout.as_slice(), output.status.code()), (&b"\n"[..], Some(0)));
        let made = path.metadata().unwrap().modified().unwrap();
        Rehearsal::new(dir.path()).unwrap();
        assert_eq!(path.metadata().unwrap().modified().unwrap(), made, "it is written once");
    }
}
