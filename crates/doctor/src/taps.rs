//! A trial of the packet redirection between a pod's interface and its VM, as when a pod starts.

use std::io;

use sandboxer_host::network;

use super::{
    PATIENCE, blocking,
    verdict::{Check, Fix, Subject},
};

const TAPS: Subject = Subject {
    name: "taps",
    why: "the kernel's traffic control redirects packets between a pod's interface and its VM's tap",
};

/// Returns the result of the trial, or `None` if it did not end in time.
pub async fn read() -> Option<io::Result<()>> {
    blocking(PATIENCE, network::trial).await
}

/// Checks the result.
pub fn judge(trial: Option<&io::Result<()>>) -> Check {
    let load = || {
        let load = "load the modules, permanently in /etc/modules-load.d";
        Fix::commands(load, [network::MODPROBE, "modprobe tun"])
    };
    match trial {
        Some(Ok(())) => TAPS.ok("a trial with two taps succeeded"),
        Some(Err(error)) if error.kind() == io::ErrorKind::PermissionDenied => {
            TAPS.warning(format!("not tried: {error}"), Fix::words("run this as root"))
        }
        Some(Err(error)) => {
            TAPS.failure(format!("pods with a network interface do not start: {error}"), load())
        }
        None => {
            TAPS.warning(format!("a trial with two taps took longer than {PATIENCE:?}"), super::ask_again())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Verdict;

    #[test]
    fn what_is_missing_comes_with_the_command_that_loads_it() {
        let missing = || io::Error::new(io::ErrorKind::NotFound, "the kernel does not have sch_ingress");
        for (trial, verdict) in [
            (Some(Ok(())), Verdict::Ok),
            (Some(Err(missing())), Verdict::Failure),
            (Some(Err(io::ErrorKind::PermissionDenied.into())), Verdict::Warning),
            (None, Verdict::Warning),
        ] {
            assert_eq!(judge(trial.as_ref()).verdict, verdict, "{trial:?}");
        }
        let check = judge(Some(&Err(missing())));
        assert!(check.seen.contains("sch_ingress"), "{check}");
        assert!(check.fix.unwrap().commands[0].starts_with("modprobe -a sch_ingress"));
    }

    #[tokio::test]
    async fn the_trial_leaves_nothing_in_the_namespace_of_who_asks() {
        let names = || std::fs::read_dir("/sys/class/net").unwrap().count();
        let before = names();
        read().await.unwrap().unwrap();
        assert_eq!(names(), before);
    }
}
