//! Tests of processes in a jail.

use std::{
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    process::Command,
};

use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use super::*;

/// Returns a filter under which the kernel creates no user namespace, as if a security module refused it.
fn refusal() -> BpfProgram {
    let flag = u64::from(libc::CLONE_NEWUSER.unsigned_abs());
    let creates_user_namespace =
        SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(flag), flag).unwrap();
    let rules = [(libc::SYS_unshare, vec![SeccompRule::new(vec![creates_user_namespace]).unwrap()])].into();
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, TargetArch::x86_64).unwrap();
    filter.try_into().unwrap()
}

/// Returns the output of `script` in a jail with `devices`. If `refused`, no user namespace is created.
fn jailed(script: &str, devices: &[&Path], refused: bool) -> String {
    let dir = tempfile::tempdir().unwrap();
    output_in(Jail::new(dir.path(), &[], devices).unwrap(), script, refused)
}

fn output_in(jail: Jail, script: &str, refused: bool) -> String {
    let refusal = refusal();
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]);
    // SAFETY: only system calls are made.
    unsafe {
        command.pre_exec(move || {
            libc::umask(0o077);
            if refused {
                apply_filter(&refusal).map_err(|_| io::Error::from(io::ErrorKind::Other))?;
            }
            jail.enter()
        });
    }
    String::from_utf8(command.output().unwrap().stdout).unwrap()
}

#[test]
fn where_no_user_namespace_is_made_all_else_holds() {
    let hosts = fs::read_link("/proc/self/ns/user").unwrap();
    let script = "readlink /proc/self/ns/user; cat /proc/self/status /dev/null && echo whole";
    for refused in [false, true] {
        let read = jailed(script, &[], refused);
        assert_eq!(read.lines().next() == hosts.to_str(), refused, "{read}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert!(read.contains(&format!("{set}:\t0000000000000000\n")), "{read}");
        }
        assert!(read.contains("\nNoNewPrivs:\t1\n") && read.contains("\nGroups:\t \n"), "{read}");
        assert!(read.ends_with("\nwhole\n"), "what was made for it cannot be reached: {read}");
        let user = read.lines().find_map(|line| line.strip_prefix("Uid:\t")).unwrap();
        assert!(user.split('\t').all(|id| id.parse::<u32>().unwrap() >= FIRST_USER), "{read}");
    }
}

/// Without a filter, each of these calls does something other than refuse, or is refused for lack of a capability.
#[test]
fn calls_that_no_vmm_makes_are_refused() {
    let calls = [
        ("io_uring_setup", libc::SYS_io_uring_setup),
        ("io_uring_enter", libc::SYS_io_uring_enter),
        ("userfaultfd", libc::SYS_userfaultfd),
        ("io_setup", libc::SYS_io_setup),
        ("bpf", libc::SYS_bpf),
        ("perf_event_open", libc::SYS_perf_event_open),
        ("kexec_load", libc::SYS_kexec_load),
        ("mount", libc::SYS_mount),
        ("open_tree", libc::SYS_open_tree),
        ("fsopen", libc::SYS_fsopen),
        ("unshare", libc::SYS_unshare),
        ("ptrace", libc::SYS_ptrace),
        ("process_vm_readv", libc::SYS_process_vm_readv),
        ("keyctl", libc::SYS_keyctl),
        ("name_to_handle_at", libc::SYS_name_to_handle_at),
        ("open_by_handle_at", libc::SYS_open_by_handle_at),
        ("modify_ldt", libc::SYS_modify_ldt),
        ("shmget", libc::SYS_shmget),
    ];
    let numbers = calls.map(|(_, number)| number.to_string()).join(" ");
    // Perl and the shell are in Debian's base.
    let script = format!(
        "exec perl -e 'print syscall($_, 0, 0, 0, 0, 0, 0) == -1 ? $!+0 : \"done\", \"\\n\" for @ARGV; \
         print socket(S, $_, 1, 0) ? \"done\" : $!+0, \"\\n\" for 1, 17, 38, 40' {numbers}"
    );
    let output = jailed(&script, &[], false);
    let output: Vec<&str> = output.lines().collect();
    let refused = libc::EPERM.to_string();
    assert_eq!(output.len(), calls.len() + 4, "{output:?}");
    for ((name, _), output) in calls.iter().zip(&output) {
        assert_eq!(*output, refused, "{name}");
    }
    // Sockets of Unix, packets, the kernel's cryptography, and the host's vsock.
    assert_eq!(output[calls.len()..], ["done", &refused, &refused, &refused]);
}

#[test]
fn a_vmm_makes_no_process_and_changes_no_user_and_no_priority() {
    let calls = [
        ("fork", libc::SYS_fork),
        ("vfork", libc::SYS_vfork),
        // The arguments of C's fork().
        ("clone", libc::SYS_clone),
        ("setuid", libc::SYS_setuid),
        ("setpriority", libc::SYS_setpriority),
        ("sched_setaffinity", libc::SYS_sched_setaffinity),
        ("clone3", libc::SYS_clone3),
    ];
    let numbers = calls.map(|(_, number)| number.to_string()).join(" ");
    let script = format!(
        "exec perl -e 'for (@ARGV) {{ my $done = syscall($_, 17, 0, 0, 0, 0, 0); exit if $done == 0 && $_ != {}; \
         print $done == -1 ? $!+0 : \"done\", \"\n\" }}' {numbers}",
        libc::SYS_setuid
    );
    let dir = tempfile::tempdir().unwrap();
    let jail = || Jail::new(dir.path(), &[], &[]).unwrap();
    let output = output_in(jail().alone().unwrap(), &script, false);
    let output: Vec<&str> = output.lines().collect();
    let refused = [libc::EPERM; 6].into_iter().chain([libc::ENOSYS]).map(|error| error.to_string());
    assert_eq!(output, refused.collect::<Vec<_>>(), "{calls:?}");
    let free = output_in(jail(), "perl -e 'print fork() ? \"forked\" : \"\"'", false);
    assert_eq!(free, "forked", "without the filter this test would see nothing");
}

/// A VMM can open devices through a group that the jail's user namespace does not know, such as that of /dev/kvm.
/// Files stand in for devices.
#[test]
fn what_a_group_may_open_is_opened_in_a_jail() {
    let dir = tempfile::tempdir().unwrap();
    let [groups, roots] = ["groups", "roots"].map(|name| dir.path().join(name));
    for (path, mode) in [(&groups, 0o660), (&roots, 0o600)] {
        fs::write(path, "").unwrap();
        chown(path, None, Some(4321)).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let script = format!(
        "for file in {} {}; do echo x >>$file && echo opened; done",
        groups.display(),
        roots.display()
    );
    assert_eq!(jailed(&script, &[&groups, &roots], false), "opened\n");
    assert_eq!(fs::read(groups).unwrap(), b"x\n");
}

/// Where the kernel has the x32 interface, such a number is the native call, which the filters do not recognize by it.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_call_by_a_number_of_x32_ends_the_process() {
    let call = |number: libc::c_long| {
        format!(
            "perl -e 'if (!fork) {{ syscall({number}); exit 0 }} wait; print $? & 127, \";\"'; echo whole"
        )
    };
    for number in [libc::SYS_io_uring_setup, libc::SYS_getpid, 512] {
        let output = jailed(&call(0x4000_0000 | number), &[], false);
        assert_eq!(output, format!("{};whole\n", libc::SIGSYS), "{number}");
    }
    assert_eq!(jailed(&call(libc::SYS_getpid), &[], false), "0;whole\n");
}
