//! Checks whether this host can run pods.
//!
//! Each subject is a file with two parts: readings of the host (files below the root of a [`Host`], programs and
//! sockets, each with a deadline), and functions from a reading to a [`Check`]. [`examine`] runs all of them for
//! `sandboxer-cli check`; [`fit`] runs those that the daemon depends on when it starts.

mod capabilities;
mod cgroup;
mod clock;
mod cni;
mod configuration;
pub mod containerd;
pub mod cri;
mod devices;
mod disk;
mod entropy;
mod filesystems;
mod host;
mod hotplug;
mod initramfs;
mod kernel;
mod kvm;
mod launcher;
mod limits;
mod memory;
mod namespaces;
mod program;
mod sandboxes;
mod start;
mod taps;
mod topology;
mod verdict;
mod vmm;

use std::{path::Path, thread, time::Duration};

use tokio::sync::oneshot;

pub use self::{
    capabilities::lacks_sys_resource,
    host::Host,
    program::version,
    start::{Unfit, fit},
    verdict::{Check, Fix, Report, SCHEMA, Verdict},
};
use sandboxer_base::sockets;
use sandboxer_config::{
    Config, VmConfig, VmmChoice,
    VmmName::{CloudHypervisor, Firecracker, Qemu},
};
pub use sandboxer_vmm::kvm::{KvmUnusable, measure as measure_kvm};
use sandboxer_vmm::qemu;

/// Deadline for one program, file or socket. Long enough for a slow host: an emulated one takes 3 s for
/// `qemu-system-x86_64 --version`.
const PATIENCE: Duration = Duration::from_secs(5);

/// The input of [`examine`].
#[derive(Debug)]
pub struct Question<'a> {
    /// Path of the daemon's configuration file, if given.
    pub config_path: Option<&'a Path>,
    /// Address of containerd's CRI socket: a path or a `unix://` address.
    pub endpoint: &'a str,
    /// Number of pods that memory, disk and limits must suffice for.
    pub pods: u32,
}

/// Runs all checks, with readings that wait in parallel. Takes at most 21 s, if everything hangs.
pub async fn examine(question: &Question<'_>) -> Report {
    let read = Config::load_or_default(question.config_path);
    let configuration = configuration::judge(question.config_path, &read);
    let config = read.unwrap_or_default();
    let host = Host::default();
    let controller = config.run_dir.join(sockets::CONTROLLER);
    let (guest_kernel, guest_initramfs) = (config.vm.kernel.clone(), config.vm.initramfs.clone());
    let cri = async {
        let cri = cri::read(question.endpoint).await;
        let (route, launcher, endangered) = tokio::join!(
            cri::route(&cri, &controller),
            launcher::read(&host, cri.runtime()),
            sandboxes::read(&cri),
        );
        (cri, route, launcher, endangered)
    };
    let kvm_and_qemu = async {
        let kvm = kvm::read(Path::new("/dev/kvm")).await;
        let accelerator = if kvm.is_used(config.vm.accelerator) { "kvm" } else { "tcg" };
        (kvm, vmm::read(&qemu::program(&config.vm, accelerator)).await)
    };
    let ((kvm, qemu), vmms, mkfs, kernel, initramfs, taps, daemon, of_containerd) = tokio::join!(
        kvm_and_qemu,
        async { tokio::join!(vmm::read(&config.vm.cloud_hypervisor), vmm::read(&config.vm.firecracker)) },
        filesystems::read_mkfs(&config.rootfs.mkfs_erofs),
        blocking(PATIENCE, move || kernel::read(&guest_kernel)),
        blocking(PATIENCE, move || initramfs::read(&guest_initramfs)),
        taps::read(),
        cri::listener(&controller),
        cri,
    );
    let (cloud_hypervisor, firecracker) = vmms;
    let (cri, route, launcher, endangered) = of_containerd;
    let kernel = kernel.unwrap_or_else(|| kernel::Reading::silent(&config.vm.kernel));
    let initramfs = initramfs.unwrap_or_else(|| initramfs::Reading::silent(&config.vm.initramfs));
    let runtime = cri.runtime();
    let processors = topology::read(&host);
    let memory = memory::read(&host);
    let limits = limits::read(&host, daemon);
    let capabilities = capabilities::read(&host, daemon, runtime.and_then(|runtime| runtime.pid));
    let device = |device| devices::judge(device, &devices::read(&host, device));
    let pods = question.pods;
    let with_handlers = |vmm| VmConfig { vmm: config.choice_of(vmm), ..config.vm.clone() };
    Report::new(
        pods,
        vec![
            configuration,
            kvm::judge(needs_kvm(&config), config.vm.accelerator, &kvm),
            vmm::qemu(&qemu, vmm::other_than_qemu(&with_handlers(Qemu), &kvm, &cloud_hypervisor)),
            vmm::cloud_hypervisor(config.choice_of(CloudHypervisor), &cloud_hypervisor),
            vmm::firecracker(config.choice_of(Firecracker), &firecracker),
            hotplug::judge(
                &config.vm,
                &hotplug::used(&config, vmm::other_than_qemu(&config.vm, &kvm, &cloud_hypervisor)),
            ),
            kernel::judge(&kernel),
            initramfs::judge(&initramfs),
            containerd::containerd(&cri),
            containerd::handler(
                &cri,
                route.as_ref(),
                containerd::Daemon { socket: &controller, config: question.config_path },
            ),
            launcher::judge(&launcher),
            sandboxes::judge(&cri, endangered.as_ref()),
            capabilities::daemon(&capabilities),
            capabilities::oom_score(&capabilities, runtime),
            namespaces::judge(namespaces::read().as_ref(), config.vm.jail),
            cni::judge(&cni::read(&host, runtime)),
            device(&devices::TUN),
            taps::judge(taps.as_ref()),
            device(&devices::VHOST_NET),
            device(&devices::VSOCK),
            filesystems::mkfs(&mkfs),
            filesystems::overlay(filesystems::filesystem(&host, "overlay")),
            filesystems::erofs(filesystems::filesystem(&host, "erofs")),
            filesystems::loops(filesystems::loop_devices(&host)),
            cgroup::judge(&cgroup::read(&host)),
            memory::free(&memory, pods, config.vm.default_memory_mib),
            memory::huge_pages(&memory),
            memory::ksm(&memory),
            disk::judge(
                &disk::read(&host, &config.state_dir),
                &disk::read(&host, &config.run_dir),
                &config,
                pods,
            ),
            topology::numa(&processors, config.placement.policy),
            topology::smt(&processors),
            limits::inotify(&limits, pods),
            limits::files(&limits, pods),
            limits::tasks(&limits, pods),
            clock::judge(&clock::read(&host)),
            entropy::judge(&entropy::read(&host)),
        ],
    )
}

/// Returns the VMM that needs KVM, among [`VmConfig::vmm`] and those of runtime handlers; if none does,
/// [`VmConfig::vmm`].
fn needs_kvm(config: &Config) -> VmmChoice {
    let all = [config.vm.vmm, config.choice_of(CloudHypervisor), config.choice_of(Firecracker)];
    let needy = |vmm: &VmmChoice| matches!(vmm, VmmChoice::CloudHypervisor | VmmChoice::Firecracker);
    all.into_iter().find(needy).unwrap_or(config.vm.vmm)
}

/// Returns the message for a file that could not be read in time.
fn slow_file(path: &Path) -> String {
    format!("{path:?} is slow to read: it took longer than {PATIENCE:?}")
}

/// Returns the fix for a slow reading.
fn ask_again() -> Fix {
    Fix::words("retry when the host and its disk are less busy")
}

/// Runs work that may hang in its own thread. Returns `None` if it did not end within `limit`. The thread then ends
/// with the process; for a thread of the runtime, the process would wait.
async fn blocking<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = oneshot::channel();
    thread::Builder::new().name("check".into()).spawn(move || drop(done.send(work()))).ok()?;
    tokio::time::timeout(limit, result).await.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_may_need_kvm() {
        let mut config = Config::default();
        assert_eq!(needs_kvm(&config), VmmChoice::Auto);
        let handler = |vmm| sandboxer_config::Handler { vmm: Some(vmm), ..Default::default() };
        config.handlers.insert("q".into(), handler(Qemu));
        assert_eq!(needs_kvm(&config), VmmChoice::Auto);
        config.handlers.insert("fc".into(), handler(Firecracker));
        assert_eq!(needs_kvm(&config), VmmChoice::Firecracker);
        config.vm.vmm = VmmChoice::CloudHypervisor;
        assert_eq!(needs_kvm(&config), VmmChoice::CloudHypervisor);
    }

    #[tokio::test]
    async fn what_comes_back_in_time_is_taken() {
        assert_eq!(blocking(PATIENCE, || 1).await, Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn what_does_not_come_back_is_given_up() {
        let (release, released) = std::sync::mpsc::channel::<()>();
        assert_eq!(blocking(PATIENCE, move || released.recv()).await, None);
        drop(release);
    }
}
