//! A real guest: the agent's initramfs and the guest kernel under QEMU's TCG.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use sandboxer_protocol::{
    agent::{AgentClient, Ready},
    boot::{AGENT_PORT, BootParams},
    link::{self, LinkKey},
    share::DISK_SERIAL,
};
use tempfile::TempDir;
use tokio::{net::UnixStream, time::timeout};
use ttrpc::r#async::{Client, transport::Socket};

/// Longest wait for anything a guest does. Emulation on a busy host is slow; nothing here is a
/// measurement.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Serial of the disk with busybox.
pub const BUSYBOX: &str = "busybox";
/// Serial of the empty ext4 disk.
pub const SCRATCH: &str = "scratch";

/// A running guest. Dropping it kills its QEMU.
pub struct Vm {
    qemu: Child,
    dir: TempDir,
    pub key: LinkKey,
}

impl Vm {
    /// Boots a guest with the busybox disk and an empty ext4 disk.
    pub fn boot() -> Self {
        Self::boot_on("max")
    }

    /// Boots a guest like [`Vm::boot`], with the disk of a share server that listens at `socket`.
    pub fn boot_with_shares(socket: &Path) -> Self {
        Self::boot_as("max", Some(socket), false)
    }

    /// Boots a guest like [`Vm::boot`], on this QEMU CPU model.
    pub fn boot_on(cpu: &str) -> Self {
        Self::boot_as(cpu, None, false)
    }

    /// Boots a guest like [`Vm::boot`], which could be frozen as a template.
    pub fn boot_as_template() -> Self {
        Self::boot_as("max", None, true)
    }

    fn boot_as(cpu: &str, shares: Option<&Path>, template: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let key = LinkKey::random();
        let image = |name: &str| {
            let path = guest_dir().join(name);
            assert!(path.exists(), "{} is missing: run `make guest-image`", path.display());
            path
        };
        let scratch = dir.path().join("scratch.ext4");
        fs::File::create(&scratch).unwrap().set_len(64 << 20).unwrap();
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&scratch));

        let log = std::env::var("SANDBOXER_TEST_GUEST_LOG").ok();
        let params = BootParams { link_key: key.clone(), log, template };
        let line = format!(
            "console=ttyS0 quiet panic=-1 reboot=t pci=off random.trust_cpu=on no_timer_check tsc=reliable \
             tsc_early_khz={} {params}",
            tsc_khz()
        );
        let disk = |node: &str, path: &Path, read_only: bool| {
            format!(
                "driver=raw,node-name={node},read-only={read_only},file.driver=file,file.filename={}",
                path.display()
            )
        };
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"])
            .args([
                "-machine",
                "microvm,acpi=on,pcie=off,pit=off,pic=off,rtc=on,isa-serial=on,auto-kernel-cmdline=off",
            ])
            .args(["-accel", "tcg,tb-size=64", "-cpu", cpu, "-smp", "1", "-m", "256M", "-bios", "qboot.rom"])
            .arg("-kernel")
            .arg(image("vmlinux"))
            .arg("-initrd")
            .arg(image("initramfs.cpio"))
            .args(["-append", &line])
            .arg("-serial")
            .arg(format!("file:{}", dir.path().join("console").display()))
            .args(["-device", "virtio-serial-device,id=serial0,max_ports=2"])
            .arg("-chardev")
            .arg(format!(
                "socket,id=agent,path={},server=on,wait=off",
                dir.path().join("agent.sock").display()
            ))
            .args(["-device", &format!("virtserialport,bus=serial0.0,nr=1,chardev=agent,name={AGENT_PORT}")])
            .args(["-device", "virtio-scsi-device,id=scsi0"])
            .args(["-blockdev", &disk("n0", busybox_image(), true)])
            .args(["-device", &format!("scsi-hd,bus=scsi0.0,lun=1,drive=n0,serial={BUSYBOX}")])
            .args(["-blockdev", &disk("n1", &scratch, false)])
            .args(["-device", &format!("virtio-blk-device,drive=n1,serial={SCRATCH}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        if let Some(socket) = shares {
            let node = format!("driver=nbd,node-name=n2,server.type=unix,server.path={}", socket.display());
            let device = format!("scsi-hd,bus=scsi0.0,lun=1,scsi-id=1,drive=n2,serial={DISK_SERIAL}");
            qemu.args(["-blockdev", &node, "-device", &device]);
        }
        let qemu = qemu.spawn().expect("qemu-system-x86_64 starts");
        Self { qemu, dir, key }
    }

    /// Connects to the host's end of the agent's port.
    pub async fn port(&self) -> UnixStream {
        let path = self.dir.path().join("agent.sock");
        let began = Instant::now();
        loop {
            match UnixStream::connect(&path).await {
                Ok(stream) => return stream,
                Err(error) => assert!(began.elapsed() < PATIENCE, "QEMU opens no socket: {error}"),
            }
            tokio::task::yield_now().await;
        }
    }

    /// Opens a session.
    pub async fn session(&self) -> (AgentClient, Ready) {
        let mut port = self.port().await;
        let ready = match timeout(PATIENCE, link::greet(&mut port, &self.key)).await {
            Ok(greeted) => greeted.unwrap().0,
            Err(_) => panic!("agent does not answer; console:\n{}", self.console()),
        };
        (AgentClient::new(Client::new(Socket::new(port))), ready)
    }

    /// Returns the bytes of the ext4 disk that are not holes.
    pub fn written(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        fs::metadata(self.dir.path().join("scratch.ext4")).unwrap().blocks() * 512
    }

    /// Returns the guest's console output.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.path().join("console")).unwrap_or_default()).into_owned()
    }

    /// Waits for QEMU to exit by itself.
    pub async fn ends(&mut self) -> std::process::ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.qemu.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < PATIENCE, "guest is still on; console:\n{}", self.console());
            tokio::task::yield_now().await;
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        if std::thread::panicking() {
            eprintln!("--- guest console ---\n{}", self.console());
        }
    }
}

fn guest_dir() -> PathBuf {
    match std::env::var_os("SANDBOXER_TEST_GUEST_DIR") {
        Some(dir) => dir.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest"),
    }
}

/// Returns an EROFS image of busybox with all applets, created once per test run.
fn busybox_image() -> &'static Path {
    static IMAGE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = IMAGE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        for name in ["bin", "etc", "tmp", "proc", "sys", "dev", "root"] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static is installed");
        let applets = Command::new("/bin/busybox").arg("--list").output().unwrap().stdout;
        for applet in String::from_utf8(applets).unwrap().lines().filter(|&name| name != "busybox") {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).unwrap();
        }
        fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\nweb:x:1000:1000::/tmp:/bin/sh\n")
            .unwrap();
        fs::write(root.join("etc/layer"), "lower\n").unwrap();
        fs::write(root.join("bin/rubbish"), "\x7fELF, or so it says").unwrap();
        use std::os::unix::fs::PermissionsExt as _;
        fs::set_permissions(root.join("bin/rubbish"), fs::Permissions::from_mode(0o755)).unwrap();
        let image = dir.path().join("busybox.erofs");
        run(Command::new("mkfs.erofs").arg(&image).arg(&root));
        (dir, image)
    });
    path
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the frequency of the host's time stamp counter, which an emulated guest reads directly.
/// Calibrating it against emulated hardware fails on a busy host.
fn tsc_khz() -> u64 {
    static KHZ: OnceLock<u64> = OnceLock::new();
    *KHZ.get_or_init(|| {
        // The least disturbed of several readings is used: the two clocks are read one after the other, and
        // on a busy host much time may pass in between.
        let read = || {
            let once = |_| {
                let before = Instant::now();
                // SAFETY: reads a register that every x86-64 CPU has.
                let count = unsafe { std::arch::x86_64::_rdtsc() };
                (before.elapsed(), before, count)
            };
            let (_, at, count) = (0..16).map(once).min().unwrap();
            (at, count)
        };
        let (began, first) = read();
        while began.elapsed() < Duration::from_millis(50) {
            std::hint::spin_loop();
        }
        let (ended, last) = read();
        let ns = ended.duration_since(began).as_nanos();
        u64::try_from(u128::from(last - first) * 1_000_000 / ns).unwrap()
    })
}
