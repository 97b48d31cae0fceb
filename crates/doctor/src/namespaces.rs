//! User namespaces: each jailed VMM has one of its own.

use std::io;

use sandboxer_process::jail;

use super::verdict::{Check, Fix, Subject};

const USERS: Subject = Subject {
    name: "user namespaces",
    why: "a VMM that a guest broke out of makes no other one from its own, and finds fewer holes in the kernel",
};

/// Tries one; why there can't be one.
pub fn read() -> Option<io::Error> {
    jail::try_user_namespace().err()
}

/// Returns whether there can be one for each VMM. `jailed`: QEMU is to be, as configured.
pub fn judge(refusal: Option<&io::Error>, jailed: bool) -> Check {
    match refusal {
        _ if !jailed => USERS.not_applicable("vm.jail is off"),
        None => USERS.ok("each VMM has its own"),
        Some(error) => USERS.warning(
            format!("the kernel makes none ({error}): VMMs are jailed without"),
            Fix::commands(
                "let it, and for good in /etc/sysctl.d, unless a security module forbids it",
                ["sysctl user.max_user_namespaces=65536"],
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::Verdict;

    #[test]
    fn a_kernel_that_makes_none_is_warned_of() {
        assert_eq!(judge(None, true).verdict, Verdict::Ok);
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let check = judge(Some(&full), true);
        assert!(check.verdict == Verdict::Warning && check.seen.contains("No space left"), "{check}");
        assert_eq!(judge(Some(&full), false).verdict, Verdict::NotApplicable);
    }

    /// The same as a program of the system's finds.
    #[test]
    fn one_is_tried_out() {
        let makes = Command::new("unshare").args(["--user", "true"]).output().unwrap().status.success();
        assert_eq!(read().is_none(), makes);
    }
}
