//! Seccomp filters of jailed processes, which refuse system calls that no VMM needs.
//!
//! VMMs have filters of their own, made for their threads: those of Cloud Hypervisor and Firecracker permit only what
//! they use, QEMU's (`-sandbox`) refuses little. The filters here are set before a VMM runs and refuse what it does
//! not need: parts of the kernel that are large, new, or give access to other processes. This is a deny list, because
//! QEMU's libraries make calls that depend on version and build, and a missing one would end a pod.
//!
//! The error is EPERM. VMMs that can use such a call, for example io_uring, fall back.
//!
//! VMMs make threads but no processes, and change neither their user nor their priority. QEMU's own filter refuses
//! that too, but some builds of QEMU have no filter.

use std::{collections::BTreeMap, io};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen::Dword, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

/// Calls that are refused with any arguments.
const REFUSED: [libc::c_long; 78] = [
    // Other interfaces for system calls and page faults.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_userfaultfd,
    // Asynchronous I/O, which waits nevertheless where a file is in the page cache. To check for it, Cloud Hypervisor
    // creates and destroys a context; for the latter the kernel waits 20 ms for its processors.
    libc::SYS_io_setup,
    // BPF and performance counters.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_fanotify_init,
    libc::SYS_lookup_dcookie,
    // kexec, modules, clock, log, swap.
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_syslog,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    // Mounts, roots, namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_unshare,
    libc::SYS_setns,
    // File handles.
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_mknodat,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_kcmp,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    // Keys.
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    // System V IPC and POSIX message queues.
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_shmdt,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semctl,
    libc::SYS_semtimedop,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_mq_timedsend,
    libc::SYS_mq_timedreceive,
    libc::SYS_mq_notify,
    libc::SYS_mq_getsetattr,
    // Obsolete calls.
    libc::SYS_nfsservctl,
    libc::SYS_remap_file_pages,
];

/// Refused calls that only x86-64 has: I/O ports, segments of the processor, and calls that other processors never
/// had.
#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: [libc::c_long; 12] = [
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_mknod,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
    libc::SYS__sysctl,
    libc::SYS_afs_syscall,
    libc::SYS_tuxcall,
    libc::SYS_security,
    libc::SYS_vserver,
];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_HERE: [libc::c_long; 0] = [];

/// The processor to which these numbers of system calls belong.
#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "aarch64")]
const ARCH: TargetArch = TargetArch::aarch64;

/// Calls refused to a process that stays alone: those that create processes, change users, or change priorities.
const REFUSED_ALONE: [libc::c_long; 14] = [
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_setpriority,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setattr,
    libc::SYS_sched_setaffinity,
];

/// Calls refused to a process that stays alone that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const REFUSED_ALONE_HERE: [libc::c_long; 2] = [libc::SYS_fork, libc::SYS_vfork];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_ALONE_HERE: [libc::c_long; 0] = [];

/// Refused socket families, as ranges: all except Unix (1), IP (2, 10) and netlink (16).
const FAMILIES: [(u64, u64); 3] = [(3, 9), (11, 15), (17, u32::MAX as u64)];

type Rules = BTreeMap<libc::c_long, Vec<SeccompRule>>;

/// Returns the filters of all jails.
pub fn filters() -> io::Result<Vec<BpfProgram>> {
    let of_families = FAMILIES.map(|(first, last)| {
        let bound = |than, value| SeccompCondition::new(0, Dword, than, value);
        SeccompRule::new(vec![bound(SeccompCmpOp::Ge, first)?, bound(SeccompCmpOp::Le, last)?])
    });
    let of_families = of_families.into_iter().collect::<Result<Vec<_>, _>>().map_err(io::Error::other)?;
    let mut rules: Rules = REFUSED.into_iter().chain(REFUSED_HERE).map(|call| (call, Vec::new())).collect();
    rules.insert(libc::SYS_socket, of_families);
    Ok(vec![native_only(), refuse(rules, libc::EPERM)?])
}

/// Returns further filters, for a tool that only reads and writes files. It cannot control a device or a file system,
/// has no socket, and creates no user namespace.
pub fn filters_of_tool() -> io::Result<[BpfProgram; 3]> {
    let flag = u64::from(libc::CLONE_NEWUSER.unsigned_abs());
    let namespace = SeccompCondition::new(0, Dword, SeccompCmpOp::MaskedEq(flag), flag)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(io::Error::other)?;
    let refused = [(libc::SYS_socket, Vec::new()), (libc::SYS_clone, vec![namespace])].into();
    let ioctl = [(libc::SYS_ioctl, Vec::new())].into();
    Ok([refuse(refused, libc::EPERM)?, refuse(ioctl, libc::ENOTTY)?, without_clone3()?])
}

/// The first number of x32's system calls.
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

/// Returns a filter that kills a process that makes a system call by an x32 number. Kernels with this interface run it
/// as the native call, but the other filters do not recognize its number.
#[cfg(target_arch = "x86_64")]
fn native_only() -> BpfProgram {
    let step = |code: u32, jt, jf, k| sock_filter { code: code as u16, jt, jf, k };
    vec![
        // The number is the first word of the filter's input.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, X32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

/// Returns a filter that allows everything, because other processors have only one interface.
#[cfg(not(target_arch = "x86_64"))]
fn native_only() -> BpfProgram {
    let allow = (libc::BPF_RET | libc::BPF_K) as u16;
    vec![sock_filter { code: allow, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW }]
}

/// Returns further filters, for a process that creates no other processes. The first execution of a program is
/// permitted, and so are later ones, which would end the VM.
pub fn filters_alone() -> io::Result<[BpfProgram; 2]> {
    let thread = SeccompCmpOp::MaskedEq(libc::CLONE_THREAD.unsigned_abs().into());
    let no_thread = SeccompCondition::new(0, Dword, thread, 0)
        .and_then(|condition| SeccompRule::new(vec![condition]))
        .map_err(io::Error::other)?;
    let alone = REFUSED_ALONE.into_iter().chain(REFUSED_ALONE_HERE);
    let mut rules: Rules = alone.map(|call| (call, Vec::new())).collect();
    rules.insert(libc::SYS_clone, vec![no_thread]);
    Ok([refuse(rules, libc::EPERM)?, without_clone3()?])
}

/// Returns a filter that makes clone3 fail with ENOSYS, so that libraries use `clone` instead. The flags of clone3 are
/// in memory, which a filter cannot read.
fn without_clone3() -> io::Result<BpfProgram> {
    refuse([(libc::SYS_clone3, Vec::new())].into(), libc::ENOSYS)
}

/// Returns a filter that refuses `rules` with `error`.
fn refuse(rules: Rules, error: libc::c_int) -> io::Result<BpfProgram> {
    let refused = SeccompAction::Errno(error.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, ARCH);
    filter.and_then(TryInto::try_into).map_err(io::Error::other)
}
