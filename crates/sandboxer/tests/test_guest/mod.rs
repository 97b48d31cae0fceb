//! A guest that tests can communicate with, in memory and as an initramfs, and the pods that it runs in.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test helper fails its test")]
#![allow(dead_code, reason = "several test programs use different parts of it")]

pub mod contract;
mod halting_kernel;
pub mod share_server;

use std::{
    env, fs, io,
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use sandboxer_config::{Accelerator, VhostNet, VmConfig, VmmChoice};
use sandboxer_process::strays;
use sandboxer_protocol::{boot::BootParams, link::LinkKey};
use sandboxer_vmm::{AgentStream, DiskFile, DiskLimits, DiskSpec, Rate, Vm, VmSpec, qemu::Qemu};
use sandboxer_vmm_fake::FakeGuest;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    time::timeout,
};

const LONG: Duration = Duration::from_secs(90);

/// The double's guest: the same answers as `init.sh`.
pub fn serve_in_memory(guest: FakeGuest) {
    tokio::spawn(async move {
        let FakeGuest { stream, mut disks, memory_mib, shares, power, .. } = guest;
        let (read, mut write) = stream.into_split();
        let mut lines = BufReader::new(read).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
            let named = |disk: &&DiskSpec| disk.serial == argument;
            let answer = match command {
                "hello" => "hello host".to_owned(),
                "await" => {
                    let disks = disks.wait_for(|disks| disks.iter().any(|disk| named(&disk))).await.unwrap();
                    let disk = disks.iter().find(named).unwrap();
                    let mut first = [0; 64];
                    let length =
                        fs::File::from(disk.file.descriptor().unwrap()).read_at(&mut first, 0).unwrap();
                    let first = String::from_utf8_lossy(&first[..length]);
                    let first = first.lines().next().unwrap();
                    format!("disk {argument} ro={} starts with {first}", u8::from(disk.read_only))
                }
                "await-gone" => {
                    disks.wait_for(|disks| !disks.iter().any(|disk| named(&disk))).await.unwrap();
                    format!("gone {argument}")
                }
                "memory" => memory_mib.borrow().to_string(),
                "ask-for-files" => ask_for_files(&shares).await,
                "power-off" => return power.off(&["guest says goodbye"]),
                other => panic!("unknown command {other}"),
            };
            if write.write_all(format!("{answer}\n").as_bytes()).await.is_err() {
                return;
            }
        }
    });
}

/// First bytes that a guest's kernel sends (`FUSE_INIT`), and the answer's header after a disk's state.
async fn ask_for_files(shares: &Path) -> String {
    let mut stream = UnixStream::connect(shares).await.unwrap();
    let mut request = [104, 26, 7, 0].map(u32::to_le_bytes).concat();
    request.extend([0; 24]);
    request.extend([7, 36].map(u32::to_le_bytes).concat());
    request.resize(104, 0);
    stream.write_all(share_server::KEY.as_bytes()).await.unwrap();
    stream.write_all(&request).await.unwrap();
    let mut head = [0; 16];
    stream.read_exact(&mut head).await.unwrap();
    let bytes = [&[1, 0, 0, 0][..], &head].concat();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A conversation with a test guest.
pub struct Guest(BufReader<Box<dyn AgentStream>>);

impl Guest {
    pub async fn connect(vm: &dyn Vm) -> Self {
        Self(BufReader::new(vm.agent_stream().await.expect("the agent has a stream")))
    }

    pub async fn tell(&mut self, line: &str) {
        self.0.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    pub async fn ask(&mut self, line: &str) -> String {
        self.tell(line).await;
        let mut answer = String::new();
        timeout(LONG, self.0.read_line(&mut answer)).await.expect("the guest answers").unwrap();
        answer.trim_end().to_owned()
    }

    pub fn into_stream(self) -> Box<dyn AgentStream> {
        self.0.into_inner()
    }
}

/// A pod's files, removed on drop.
pub struct Pod {
    name: &'static str,
    dir: TempDir,
}

impl Pod {
    pub fn new(name: &'static str) -> Self {
        let pod = Self { name, dir: tempfile::tempdir().unwrap() };
        fs::create_dir(pod.path("run")).unwrap();
        pod
    }

    pub fn name(&self) -> &str {
        self.name
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns a VM with the guest of `init.sh`.
    pub fn spec(&self) -> VmSpec {
        self.spec_of(built("vmlinux"), self.initramfs())
    }

    /// Returns a VM whose guest halts at once.
    pub fn halting_spec(&self) -> VmSpec {
        let (kernel, initramfs) = (self.path("halting"), self.path("nothing"));
        fs::write(&kernel, halting_kernel::ELF).unwrap();
        // It may contain a double's behaviour.
        if !initramfs.exists() {
            fs::write(&initramfs, "nothing").unwrap();
        }
        self.spec_of(kernel, initramfs)
    }

    /// Returns a VM with this guest.
    pub fn spec_of(&self, kernel: PathBuf, initramfs: PathBuf) -> VmSpec {
        VmSpec {
            pod: self.name.parse().unwrap(),
            run_dir: self.path("run"),
            vcpus: 1,
            huge_pages: false,
            memory_file: None,
            background: false,
            memory_mib: 128,
            growth_mib: 0,
            growth_vcpus: 0,
            nics: 0,
            taps: Vec::new(),
            named_taps: None,
            kernel,
            initramfs,
            boot: BootParams { link_key: LinkKey::random(), log: None, template: false },
            disks: Vec::new(),
            console_log_bytes: 64 << 10,
            cgroup: None,
        }
    }

    /// Creates a disk as [`Pod::disk`] does, with limits.
    pub fn limited_disk(&self, serial: &str) -> DiskSpec {
        let bytes = Some(Rate { per_second: 1 << 20, burst: 4 << 20 });
        let limits = DiskLimits { bytes, operations: Some(Rate::plain(500)) };
        DiskSpec { limits, ..self.disk(serial) }
    }

    /// Creates a disk whose first line is its serial.
    pub fn disk(&self, serial: &str) -> DiskSpec {
        let path = self.path(&format!("{serial}.img"));
        let mut image = format!("{serial}\n").into_bytes();
        image.resize(1 << 20, 0);
        fs::write(&path, image).unwrap();
        let file = fs::File::options().read(true).write(true).open(&path).unwrap();
        let file = DiskFile::new(file, path).unwrap();
        DiskSpec { serial: serial.into(), file, read_only: false, limits: DiskLimits::default() }
    }

    /// Creates a disk as [`Pod::disk`] does, which the guest can only read.
    pub fn read_only_disk(&self, serial: &str) -> DiskSpec {
        read_only(&self.disk(serial))
    }

    pub fn script(&self, name: &str, body: &str) -> PathBuf {
        let (text, path) = (self.path(&format!("{name}.text")), self.path(name));
        fs::write(&text, format!("#!/bin/sh\n{body}\n")).unwrap();
        // Written by another process: if it is open for writing here, a process that another test forks at this moment
        // inherits the descriptor, and the file cannot be executed until that process is gone.
        let copied = Command::new("install").args(["-m", "755"]).args([&text, &path]).status().unwrap();
        assert!(copied.success());
        path
    }

    /// Asserts that there is no socket, and no process of the VM.
    pub async fn assert_nothing_left(&self) {
        let sockets: Vec<_> = fs::read_dir(self.path("run"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.ends_with(".sock"))
            .collect();
        assert!(sockets.is_empty(), "left behind: {sockets:?}");
        // A VMM process is marked with the directory of its VM.
        let run_dir = self.path("run");
        let reaped = async {
            while !strays::started_for(&run_dir).unwrap().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        timeout(LONG, reaped).await.expect("the process is killed and reaped");
    }

    fn initramfs(&self) -> PathBuf {
        let root = self.path("root");
        let archive = self.path("initramfs.cpio");
        for dir in ["bin", "dev", "proc", "sys"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        fs::copy("/bin/busybox", root.join("bin/busybox")).expect("Debian's busybox-static is installed");
        fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/test_guest/init.sh"), root.join("init"))
            .unwrap();
        fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755)).unwrap();
        let mut cpio = Command::new("cpio")
            .args(["--quiet", "-H", "newc", "-o"])
            .current_dir(&root)
            .stdin(Stdio::piped())
            .stdout(fs::File::create(&archive).unwrap())
            .spawn()
            .expect("cpio is installed");
        let names = b"bin\nbin/busybox\ndev\ninit\nproc\nsys\n";
        std::io::Write::write_all(&mut cpio.stdin.take().unwrap(), names).unwrap();
        assert!(cpio.wait().unwrap().success());
        archive
    }
}

/// A failed test leaves no VMM either.
impl Drop for Pod {
    fn drop(&mut self) {
        for stray in strays::started_for(&self.path("run")).unwrap() {
            stray.end().unwrap();
        }
    }
}

/// Returns QEMU with an accelerator that works here.
pub async fn qemu() -> Qemu {
    Qemu::new(&vm_config()).await.expect("auto always finds an accelerator")
}

/// Returns a stand-in for QEMU.
pub async fn qemu_program(program: &Path) -> Qemu {
    let config = VmConfig {
        qemu: Some(program.into()),
        // A hung one must not delay the test for long.
        boot_timeout: Duration::from_secs(2),
        // It reports its pid in a file.
        jail: false,
        ..vm_config()
    };
    Qemu::new(&config).await.expect("auto always finds an accelerator")
}

/// Returns an accelerator that works, or the one in `SANDBOXER_TEST_ACCELERATOR`: in a VM a KVM may be slow but
/// correct.
fn accelerator() -> Accelerator {
    match env::var("SANDBOXER_TEST_ACCELERATOR").as_deref() {
        Ok("kvm") => Accelerator::Kvm,
        Ok("tcg") => Accelerator::Tcg,
        Ok(other) => panic!("SANDBOXER_TEST_ACCELERATOR={other}: kvm and tcg are what there is"),
        Err(_) => Accelerator::Auto,
    }
}

/// Returns the configuration of VMs in tests.
pub fn vm_config() -> VmConfig {
    VmConfig {
        idle_cgroup: String::new(),
        vhost_net: VhostNet::Auto,
        jail: true,
        vmm: VmmChoice::Auto,
        qemu: None,
        cloud_hypervisor: "cloud-hypervisor".into(),
        firecracker: "firecracker".into(),
        accelerator: accelerator(),
        kernel: guest_image("vmlinux"),
        initramfs: guest_image("initramfs.cpio"),
        default_vcpus: 1,
        default_memory_mib: 128,
        max_vcpus: 1,
        max_memory_mib: 128,
        hotplug_memory_mib: 0,
        hotplug_vcpus: 0,
        boot_timeout: LONG,
        call_timeout: Duration::from_secs(20),
        stop_timeout: LONG,
        agent_timeout: LONG,
        console_log_bytes: 64 << 10,
        agent_log: None,
    }
}

/// Returns the path of a part of the guest image, if it is built.
pub fn guest_image(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest").join(name)
}

/// Returns a part of the guest image.
fn built(name: &str) -> PathBuf {
    let path = guest_image(name);
    assert!(path.exists(), "{} is not built: run `make guest-image`", path.display());
    path
}

/// Returns a disk as one that the guest can only read.
pub fn read_only(disk: &DiskSpec) -> DiskSpec {
    let path = disk.file.name().to_owned();
    let file = DiskFile::new(fs::File::open(&path).unwrap(), path).unwrap();
    DiskSpec { file, read_only: true, ..disk.clone() }
}

/// Returns whether process `pid` has the file of `disk` open. A double is this process, which has it open as `disk` itself.
pub fn has_open(pid: u32, disk: &DiskSpec) -> io::Result<bool> {
    let inode = disk.file.inode()?;
    let open =
        fs::read_dir(format!("/proc/{pid}/fd"))?.flatten().filter_map(|fd| fs::metadata(fd.path()).ok());
    let own = usize::from(pid == std::process::id());
    Ok(open.filter(|open| (open.dev(), open.ino()) == inode).count() > own)
}
