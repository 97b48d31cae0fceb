//! Limits of the process: resources, capabilities, system calls.

use std::{collections::BTreeMap, sync::LazyLock};

use anyhow::Context;
use caps::{CapSet, Capability, CapsHashSet};
use rustix::{
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::{CapabilitiesSecureBits, set_capabilities_secure_bits, set_no_new_privs, set_thread_groups},
};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// The memory in addition to the memory per file, bytes.
const MEMORY: u64 = 64 << 20;
/// The memory per file that the guest's kernel knows, bytes.
const MEMORY_PER_FILE: u64 = 1 << 10;

/// The capabilities to act with the rights of a file's owner. The guest's kernel has checked permissions.
///
/// `MKNOD` is not included: a device created by a guest would be a device of the host. Nor is `DAC_READ_SEARCH`: with
/// it, open_by_handle_at(2) opens any file of a share's file system, inside the share or not.
pub const RETAINED: [Capability; 7] = [
    Capability::CAP_CHOWN,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_FOWNER,
    Capability::CAP_FSETID,
    Capability::CAP_SETUID,
    Capability::CAP_SETGID,
    Capability::CAP_SETFCAP,
];

/// Limits memory and open files for a guest that knows up to `files` files.
pub fn limit(files: u64) -> anyhow::Result<()> {
    let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let set = |resource, most| setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) });
    set(Resource::Nofile, files.min(hard)).context("cannot limit open files")?;
    set(Resource::Data, MEMORY + files * MEMORY_PER_FILE).context("cannot limit memory")
}

/// Drops all capabilities except [`RETAINED`]. They stay when a thread acts as another user for a moment, to create a file
/// of that user.
pub fn drop_rights() -> anyhow::Result<()> {
    // These are groups of the user who started the daemon: a thread that acts as another user would still have them.
    set_thread_groups(&[]).context("cannot leave supplementary groups")?;
    let retained: CapsHashSet = RETAINED.into_iter().collect();
    let bits = CapabilitiesSecureBits::NO_SETUID_FIXUP
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED;
    set_capabilities_secure_bits(bits).context("cannot keep capabilities across users")?;
    for capability in caps::runtime::thread_all_supported() {
        if !retained.contains(&capability) {
            caps::drop(None, CapSet::Bounding, capability)
                .with_context(|| format!("cannot drop {capability}"))?;
        }
    }
    caps::clear(None, CapSet::Inheritable).context("cannot clear inheritable capabilities")?;
    caps::set(None, CapSet::Effective, &retained).context("cannot drop effective capabilities")?;
    caps::set(None, CapSet::Permitted, &retained).context("cannot drop permitted capabilities")?;
    set_no_new_privs(true).context("cannot set no_new_privs")
}

/// System calls that a serving thread may use. Any other fails with EPERM, which the guest receives.
const CALLS: [libc::c_long; 62] = [
    // file operations
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_getdents64,
    libc::SYS_statx,
    libc::SYS_name_to_handle_at,
    libc::SYS_fstatfs,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_readlinkat,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_truncate,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_getxattr,
    libc::SYS_setxattr,
    libc::SYS_listxattr,
    libc::SYS_removexattr,
    libc::SYS_fcntl,
    libc::SYS_umask,
    // users and capabilities
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_capget,
    libc::SYS_capset,
    // the connection to the VMM or the guest
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    // memory, locks, time, exit
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_tgkill,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// `poll(2)` of the C library.
#[cfg(target_arch = "x86_64")]
const POLL: libc::c_long = libc::SYS_poll;
#[cfg(not(target_arch = "x86_64"))]
const POLL: libc::c_long = libc::SYS_ppoll;

/// The processor to which these numbers of system calls belong.
#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "aarch64")]
const ARCH: TargetArch = TargetArch::aarch64;

/// The socket options that may also be set: the buffer's size, and the receive timeout.
const OPTIONS: [libc::c_int; 2] = [libc::SO_SNDBUF, libc::SO_RCVTIMEO];

static PROGRAM: LazyLock<Result<BpfProgram, String>> = LazyLock::new(|| {
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let mut rules: BTreeMap<_, _> = CALLS.into_iter().chain([POLL]).map(|call| (call, Vec::new())).collect();
    let filter = options().and_then(|options| {
        rules.insert(libc::SYS_setsockopt, options);
        SeccompFilter::new(rules, refused, SeccompAction::Allow, ARCH)
    });
    filter.and_then(BpfProgram::try_from).map_err(|error| error.to_string())
});

fn options() -> Result<Vec<SeccompRule>, BackendError> {
    let equals = |argument, value: libc::c_int| {
        SeccompCondition::new(
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            u64::from(value.unsigned_abs()),
        )
    };
    let rule = |option| SeccompRule::new(vec![equals(1, libc::SOL_SOCKET)?, equals(2, option)?]);
    OPTIONS.into_iter().map(rule).collect()
}

/// Restricts this thread to the system calls that serving needs. No thread or process can be created afterwards.
pub fn restrict_calls() -> anyhow::Result<()> {
    let program =
        PROGRAM.as_ref().map_err(|error| anyhow::anyhow!("cannot create the seccomp filter: {error}"))?;
    seccompiler::apply_filter(program).context("cannot apply the seccomp filter")
}
