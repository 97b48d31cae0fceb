//! Tests whether KVM is usable, by running guest code on it.
//!
//! A `/dev/kvm` that opens and creates VMs may still be unusable: inside a VM without nested virtualization it may
//! interpret each privileged guest instruction, and give up on some that every Linux guest executes. So a small guest
//! is run from real mode to long mode through instructions of an ordinary kernel, and its speed is compared with
//! [`MIN_EXITS_PER_SECOND`].

use std::{
    ffi::{CStr, CString},
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};

/// Guest instructions per second below which KVM is used only if it is configured by name. A KVM that interprets was
/// measured at 0.2 to 1 million of these. On hardware, eight of them should take a few hundred cycles,
/// which makes tens of millions (estimated: no such host was available).
pub const MIN_EXITS_PER_SECOND: f64 = 5e6;

/// Rounds timed at most; the fastest counts, since the others may have shared their CPU.
const ROUNDS: usize = 16;
/// No further round starts after this time.
const DEADLINE: Duration = Duration::from_millis(100);
/// Instructions of one round of [`CODE`]'s loop.
const ROUND: f64 = 8.0 * 1000.0;

/// Layout of the guest's memory: code, data, three levels of page tables, stack.
const CODE_AT: usize = 0x1000;
const PML4_AT: usize = 0x3000;
const PDPT_AT: usize = 0x4000;
const PD_AT: usize = 0x5000;
const STACK_TOP: usize = 0x8000;
const PAGE: usize = 0x1000;
/// Entry of the second part of [`CODE`].
const NEEDS_AT: usize = CODE_AT + 0xb0;

/// The guest, entered in real mode at [`CODE_AT`].
#[rustfmt::skip]
const CODE: [u8; 0xcd] = [
    0xfa,                                           // cli
    0x31, 0xc0, 0x8e, 0xd8,                         // xor ax,ax; mov ds,ax
    0x66, 0x0f, 0x01, 0x16, 0x68, 0x10,             // lgdt [0x1068]
    0x66, 0xb8, 0x00, 0x30, 0x00, 0x00,             // mov eax,PML4_AT
    0x0f, 0x22, 0xd8,                               // mov cr3,eax
    0x66, 0xb8, 0x20, 0x00, 0x00, 0x00,             // mov eax,CR4.PAE
    0x0f, 0x22, 0xe0,                               // mov cr4,eax
    0x66, 0xb9, 0x80, 0x00, 0x00, 0xc0,             // mov ecx,MSR_EFER
    0x66, 0xb8, 0x00, 0x01, 0x00, 0x00,             // mov eax,EFER.LME
    0x66, 0x31, 0xd2,                               // xor edx,edx
    0x0f, 0x30,                                     // wrmsr
    0x0f, 0x20, 0xc0,                               // mov eax,cr0
    0x66, 0x0d, 0x01, 0x00, 0x00, 0x80,             // or eax,CR0.PG|CR0.PE
    0x0f, 0x22, 0xc0,                               // mov cr0,eax
    0x66, 0xea, 0x80, 0x10, 0x00, 0x00, 0x08, 0x00, // ljmp 8:0x1080
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    // 0x1050: GDT: nothing, 64-bit code, data
    0, 0, 0, 0, 0, 0, 0, 0,
    0xff, 0xff, 0, 0, 0, 0x9a, 0xaf, 0,
    0xff, 0xff, 0, 0, 0, 0x92, 0xcf, 0,
    // 0x1068: its limit and address
    0x17, 0x00, 0x50, 0x10, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    // 0x1080: 64-bit
    0xb8, 0x10, 0, 0, 0,                            // mov eax,0x10
    0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0,             // mov ds,eax; mov es,eax; mov ss,eax
    // 0x108b: one round
    0xbf, 0xe8, 0x03, 0, 0,                         // mov edi,1000
    0x31, 0xc0,                                     // again: xor eax,eax
    0xf0, 0x48, 0x0f, 0xc1, 0x04, 0x25, 0x00, 0x20, 0, 0, // lock xadd [0x2000],rax
    0x0f, 0x20, 0xd8, 0x0f, 0x22, 0xd8,             // mov rax,cr3; mov cr3,rax
    0x9c, 0x58,                                     // pushf; pop rax
    0xff, 0xcf, 0x75, 0xe8,                         // dec edi; jnz again
    0xf4, 0xeb, 0xe0,                               // hlt; jmp 0x108b
    0, 0, 0, 0, 0,
    // 0x10b0: what Linux needs and interpreters lack
    0xf0, 0x48, 0x0f, 0xc7, 0x0c, 0x25, 0x00, 0x20, 0, 0, // lock cmpxchg16b [0x2000]
    0x48, 0x0f, 0xae, 0x04, 0x25, 0x00, 0x22, 0, 0, // fxsave64 [0x2200]
    0x48, 0x0f, 0xae, 0x0c, 0x25, 0x00, 0x22, 0, 0, // fxrstor64 [0x2200]
    0xf4,                                           // hlt
];

/// Why KVM is not usable.
#[derive(Debug, thiserror::Error)]
pub enum KvmUnusable {
    /// No permission, no module, no device.
    #[error("cannot open {path:?}")]
    Open {
        /// The device.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Only root can open it.
    #[error(
        "{path:?} has mode {mode:03o} and group {group}: no group but root's may open it, and VMMs run as users of \
         their own"
    )]
    Closed {
        /// The device.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
        /// Number of its group.
        group: u32,
    },
    /// It opens but creates no VM.
    #[error("KVM cannot {action}")]
    Setup {
        /// What was attempted.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A guest cannot run on it.
    #[error(
        "KVM ran {:.1} million guest instructions per second and then gave up on one that every \
         Linux guest needs ({exit})", rate / 1e6
    )]
    Fault {
        /// Instructions per second before.
        rate: f64,
        /// How the guest exited.
        exit: String,
    },
    /// It works but is slow: usable if configured by name. The cause is not known: KVM may interpret, or be
    /// emulated itself.
    #[error(
        "KVM runs {:.1} million guest instructions per second, under {:.0} million: too slow for \"auto\"",
        rate / 1e6, MIN_EXITS_PER_SECOND / 1e6
    )]
    Slow {
        /// Instructions per second.
        rate: f64,
    },
}

/// One page of guest memory.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Runs the guest. Returns its instructions per second if KVM is usable. Blocks for 5 to 150 ms.
pub fn measure(device: &Path) -> Result<f64, KvmUnusable> {
    let setup = |action| move |error: kvm_ioctls::Error| KvmUnusable::Setup { action, source: error.into() };
    // Declared before the VM, hence dropped after it.
    let mut memory = guest_memory();
    let kvm = open(device)?;
    let vm = kvm.create_vm().map_err(setup("create a VM"))?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: size_of_val(&*memory) as u64,
        userspace_addr: memory.as_mut_ptr() as u64,
    };
    // SAFETY: the region is page-aligned and as long as `memory`, which outlives `vm` and `vcpu` and is not
    // read meanwhile.
    unsafe { vm.set_user_memory_region(region) }.map_err(setup("give a VM memory"))?;
    let mut vcpu = vm.create_vcpu(0).map_err(setup("create a vCPU"))?;
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(setup("list CPU features"))?;
    vcpu.set_cpuid2(&cpuid).map_err(setup("set CPU features"))?;
    let mut segments = vcpu.get_sregs().map_err(setup("read registers"))?;
    (segments.cs.base, segments.cs.selector) = (0, 0);
    vcpu.set_sregs(&segments).map_err(setup("set registers"))?;
    enter_at(&vcpu, CODE_AT).map_err(setup("set registers"))?;

    let rate = judge(&mut vcpu)?;
    opens_in_a_jail(device).map(|()| rate)
}

/// Checks that a jailed VMM, which is a member of the device's group, can open it.
fn opens_in_a_jail(device: &Path) -> Result<(), KvmUnusable> {
    let meta = fs::metadata(device).map_err(|source| KvmUnusable::Open { path: device.into(), source })?;
    let mode = meta.mode() & 0o777;
    let others = mode & 0o006 == 0o006;
    let group = meta.gid() != 0 && mode & 0o060 == 0o060;
    match others || group {
        true => Ok(()),
        false => Err(KvmUnusable::Closed { path: device.into(), mode, group: meta.gid() }),
    }
}

fn open(device: &Path) -> Result<Kvm, KvmUnusable> {
    let failed = |source| KvmUnusable::Open { path: device.into(), source };
    let path = CString::new(device.as_os_str().as_bytes()).map_err(|error| failed(error.into()))?;
    Kvm::new_with_path::<&CStr>(&path).map_err(|error| failed(error.into()))
}

/// Returns memory with the code and with tables that map the first 2 MiB to themselves.
fn guest_memory() -> Box<[Page]> {
    const PRESENT_WRITABLE: usize = 0x3;
    const LARGE: usize = 0x80;
    let mut memory = vec![Page([0; PAGE]); STACK_TOP / PAGE].into_boxed_slice();
    memory[CODE_AT / PAGE].0[..CODE.len()].copy_from_slice(&CODE);
    for (at, entry) in [
        (PML4_AT, PDPT_AT | PRESENT_WRITABLE),
        (PDPT_AT, PD_AT | PRESENT_WRITABLE),
        (PD_AT, LARGE | PRESENT_WRITABLE),
    ] {
        memory[at / PAGE].0[..size_of::<usize>()].copy_from_slice(&entry.to_le_bytes());
    }
    memory
}

fn enter_at(vcpu: &VcpuFd, address: usize) -> Result<(), kvm_ioctls::Error> {
    vcpu.set_regs(&kvm_regs {
        rip: address as u64,
        rsp: STACK_TOP as u64,
        // Bit 1 is always set.
        rflags: 2,
        ..kvm_regs::default()
    })
}

fn judge(vcpu: &mut VcpuFd) -> Result<f64, KvmUnusable> {
    let begun = Instant::now();
    let mut rate: f64 = 0.0;
    for _ in 0..ROUNDS {
        let round = Instant::now();
        run(vcpu, rate)?;
        rate = rate.max(ROUND / round.elapsed().as_secs_f64());
        if begun.elapsed() > DEADLINE {
            break;
        }
    }
    enter_at(vcpu, NEEDS_AT)
        .map_err(|error| KvmUnusable::Setup { action: "set registers", source: error.into() })?;
    run(vcpu, rate)?;
    if rate < MIN_EXITS_PER_SECOND { Err(KvmUnusable::Slow { rate }) } else { Ok(rate) }
}

/// Runs the guest to its next halt.
fn run(vcpu: &mut VcpuFd, rate: f64) -> Result<(), KvmUnusable> {
    loop {
        return match vcpu.run() {
            Ok(VcpuExit::Hlt) => Ok(()),
            Ok(other) => Err(KvmUnusable::Fault { rate, exit: format!("{other:?}") }),
            // A signal to this process, such as the end of a child; the guest continues where it was.
            Err(error) if error.errno() == libc::EINTR => continue,
            Err(error) => Err(KvmUnusable::Setup { action: "run a guest", source: error.into() }),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_device_that_is_no_kvm_is_named() {
        let error = measure(Path::new("/nonexistent/kvm")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/kvm"), "{error}");
        assert!(matches!(measure(Path::new("/dev/null")), Err(KvmUnusable::Setup { .. })));
    }

    #[test]
    fn a_device_that_is_roots_alone_is_closed_to_jails() {
        let device = tempfile::NamedTempFile::new().unwrap();
        for (group, mode, opens) in [
            (0, 0o600, false),
            (0, 0o660, false),
            (4321, 0o600, false),
            (4321, 0o640, false),
            (4321, 0o660, true),
            (0, 0o666, true),
        ] {
            std::os::unix::fs::chown(device.path(), None, Some(group)).unwrap();
            fs::set_permissions(device.path(), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(opens_in_a_jail(device.path()).is_ok(), opens, "{mode:o} of group {group}");
        }
        let error = KvmUnusable::Closed { path: "/dev/kvm".into(), mode: 0o600, group: 0 };
        assert!(error.to_string().starts_with("\"/dev/kvm\" has mode 600 and group 0"), "{error}");
    }

    /// The verdict must rest on a measurement, usable or not.
    #[test]
    fn a_kvm_that_opens_is_judged_by_what_its_guest_did() {
        match measure(Path::new("/dev/kvm")) {
            Ok(rate) => assert!(rate >= MIN_EXITS_PER_SECOND, "{rate}"),
            Err(KvmUnusable::Slow { rate }) => assert!(rate > 0.0 && rate < MIN_EXITS_PER_SECOND, "{rate}"),
            Err(KvmUnusable::Fault { rate, exit }) => {
                assert!(rate > 0.0, "the loop of plain instructions ended in {exit}");
            }
            Err(KvmUnusable::Closed { mode, .. }) => assert_eq!(mode & 0o006, 0),
            Err(KvmUnusable::Open { .. }) => assert!(Kvm::new().is_err(), "/dev/kvm opens after all"),
            Err(error @ KvmUnusable::Setup { .. }) => panic!("{error}"),
        }
    }
}
