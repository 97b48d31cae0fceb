//! User namespaces, of which each jailed VMM has its own.

use std::io;

use sandboxer_process::jail;

use super::verdict::{Check, Fix, Subject};

const USERS: Subject = Subject {
    name: "user namespaces",
    why: "a compromised VMM cannot create further namespaces and reaches less of the kernel",
};

/// Tries to create a user namespace. Returns the error, or `None` if it succeeded.
pub fn read() -> Option<io::Error> {
    jail::try_user_namespace().err()
}

/// Checks that VMMs can have user namespaces. `jailed`: whether QEMU is jailed, as configured.
pub fn judge(refusal: Option<&io::Error>, jailed: bool) -> Check {
    match refusal {
        _ if !jailed => USERS.not_applicable("vm.jail is off"),
        None => USERS.ok("each VMM has its own"),
        Some(error) => USERS.warning(
            format!("cannot create one ({error}): VMMs are jailed without"),
            Fix::commands(
                "raise the limit, permanently in /etc/sysctl.d; or check whether a security module forbids it",
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

    /// A program of the system comes to the same result.
    #[test]
    fn one_is_tried_out() {
        let makes = Command::new("unshare").args(["--user", "true"]).output().unwrap().status.success();
        assert_eq!(read().is_none(), makes);
    }
}
