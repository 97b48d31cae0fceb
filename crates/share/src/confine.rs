//! What the process may use, do and call.

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

/// Memory beside what each known file takes, bytes.
const MEMORY: u64 = 64 << 20;
/// Memory per file that the guest's kernel knows, bytes.
const MEMORY_PER_FILE: u64 = 1 << 10;

/// What acting with the rights of a file's owner takes. The guest's kernel has checked who may do what.
///
/// Not among them is `MKNOD`: a device made by a guest would be one of the host. `DAC_READ_SEARCH` is there
/// for linkat(2) with a descriptor alone; what makes it dangerous, open_by_handle_at(2), can't be called.
pub const KEPT: [Capability; 8] = [
    Capability::CAP_CHOWN,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_FOWNER,
    Capability::CAP_FSETID,
    Capability::CAP_SETUID,
    Capability::CAP_SETGID,
    Capability::CAP_SETFCAP,
];

/// Bounds open files and memory. Every file that the guest's kernel knows is open here.
pub fn limit(files: u64) -> anyhow::Result<()> {
    let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let set = |resource, most| setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) });
    set(Resource::Nofile, files.min(hard)).context("cannot limit open files")?;
    set(Resource::Data, MEMORY + files.min(hard) * MEMORY_PER_FILE).context("cannot limit memory")
}

/// Gives up all rights but those that files of any owner take. They stay when a thread acts as another user
/// for a moment, to make a file that is that user's.
pub fn drop_rights() -> anyhow::Result<()> {
    // Those of whoever started the daemon: as another user, a thread would still be in them.
    set_thread_groups(&[]).context("cannot leave supplementary groups")?;
    let kept: CapsHashSet = KEPT.into_iter().collect();
    let bits = CapabilitiesSecureBits::NO_SETUID_FIXUP
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED;
    set_capabilities_secure_bits(bits).context("cannot keep capabilities across users")?;
    for capability in caps::runtime::thread_all_supported() {
        if !kept.contains(&capability) {
            caps::drop(None, CapSet::Bounding, capability)
                .with_context(|| format!("cannot drop {capability}"))?;
        }
    }
    caps::clear(None, CapSet::Inheritable).context("cannot clear inheritable capabilities")?;
    caps::set(None, CapSet::Effective, &kept).context("cannot drop effective capabilities")?;
    caps::set(None, CapSet::Permitted, &kept).context("cannot drop permitted capabilities")?;
    set_no_new_privs(true).context("cannot renounce new privileges")
}

/// What a thread that serves may call. Anything else fails with EPERM: the guest is told so, and goes on.
const CALLS: [libc::c_long; 74] = [
    // files, as the guest asks
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_getdents64,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_readlinkat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_truncate,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getxattr,
    libc::SYS_setxattr,
    libc::SYS_listxattr,
    libc::SYS_removexattr,
    libc::SYS_fcntl,
    libc::SYS_umask,
    // whose they become
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_capget,
    libc::SYS_capset,
    // the VMM, or the guest
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_poll,
    // memory, locks, time and the end of the process
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

/// Options of a connection that may be set, beside those calls: how much it holds, and how long it is waited for.
const OPTIONS: [libc::c_int; 2] = [libc::SO_SNDBUF, libc::SO_RCVTIMEO];

static PROGRAM: LazyLock<Result<BpfProgram, String>> = LazyLock::new(|| {
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let mut rules: BTreeMap<_, _> = CALLS.into_iter().map(|call| (call, Vec::new())).collect();
    let filter = options().and_then(|options| {
        rules.insert(libc::SYS_setsockopt, options);
        SeccompFilter::new(rules, refused, SeccompAction::Allow, TargetArch::x86_64)
    });
    filter.and_then(BpfProgram::try_from).map_err(|error| error.to_string())
});

fn options() -> Result<Vec<SeccompRule>, BackendError> {
    let is = |argument, value: libc::c_int| {
        SeccompCondition::new(
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::Eq,
            u64::from(value.unsigned_abs()),
        )
    };
    let rule = |option| SeccompRule::new(vec![is(1, libc::SOL_SOCKET)?, is(2, option)?]);
    OPTIONS.into_iter().map(rule).collect()
}

/// Takes from this thread every call but those that serving takes. No thread and no process is made after it.
pub fn restrict_calls() -> anyhow::Result<()> {
    let program =
        PROGRAM.as_ref().map_err(|error| anyhow::anyhow!("cannot make a filter of calls: {error}"))?;
    seccompiler::apply_filter(program).context("cannot filter calls")
}
