//! Whether a daemon can be removed, against a double of it and processes that stand for VMs.

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Child, Command},
};

use sandboxer_protocol::admin::{ListQuarantineResponse, Pod, Quarantined};

use crate::admin_double::{AdminDouble, cli_at};

/// A process that a daemon started in `run_dir`.
struct Vmm(Child);

impl Vmm {
    fn in_dir(run_dir: &Path) -> Self {
        fs::create_dir_all(run_dir).unwrap();
        let mut sleep = Command::new("sleep");
        Self(sleep.arg("600").env("SANDBOXER_RUN_DIR", run_dir).current_dir(run_dir).spawn().unwrap())
    }

    fn runs(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn pods(states: &[&str]) -> AdminDouble {
    let pod = |state: &&str| Pod { id: format!("id-{state}"), state: (*state).into(), ..Default::default() };
    AdminDouble { pods: states.iter().map(pod).collect(), ..Default::default() }
}

#[test]
fn a_daemon_is_idle_while_every_pod_is_without_a_vm_and_nothing_is_in_quarantine() {
    pods(&["created", "stopped"]).serve().cli("idle").ok();
    for state in ["starting", "ready", "stopping", "unknown", "of a later version"] {
        let error = pods(&["stopped", state]).serve().cli("idle").failed(1);
        assert!(error.contains(&format!("pod id-{state} (/) is {state}")), "{error}");
        assert!(!error.contains("id-stopped"), "{error}");
    }
    let entries = vec![Quarantined { name: "17-web".into(), ..Default::default() }];
    let quarantine = ListQuarantineResponse { entries, ..Default::default() };
    let error = AdminDouble { quarantine, ..Default::default() }.serve().cli("idle").failed(1);
    assert!(error.contains("pods run") && error.contains("record 17-web is in quarantine"), "{error}");
}

#[test]
fn processes_of_pods_are_in_the_way_and_those_of_the_pool_are_not() {
    let daemon = pods(&[]).serve();
    let run_dir = daemon.socket.parent().unwrap();
    let mut spares = ["pool/p-1", "template"].map(|name| Vmm::in_dir(&run_dir.join(name)));
    daemon.cli("idle").ok();
    let refused = daemon.cli("idle --end").failed(1);
    assert!(refused.contains("stop it before"), "{refused}");
    assert!(spares.iter_mut().all(Vmm::runs));
    // One that the daemon does not know, one of a pod that was claimed from the pool.
    let other = Vmm::in_dir(&run_dir.join("pods/a"));
    let claimed = Vmm::in_dir(&run_dir.join("pool/p-2"));
    fs::rename(run_dir.join("pool/p-2"), run_dir.join("pods/b")).unwrap();
    // Its old place is taken.
    fs::create_dir(run_dir.join("pool/p-2")).unwrap();
    let error = daemon.cli("idle").failed(1);
    for pid in [other.0.id(), claimed.0.id()] {
        assert!(error.contains(&format!("process {pid} (sleep)")), "{error}");
    }
}

#[test]
fn when_the_daemon_is_gone_only_spare_vms_are_ended_and_none_under_a_pod() {
    let dir = tempfile::tempdir().unwrap();
    let socket: PathBuf = dir.path().join("admin.sock");
    let mut spare = Vmm::in_dir(&dir.path().join("pool/p-1"));
    let other = Vmm::in_dir(&dir.path().join("pods/a"));
    for line in ["idle", "idle --end"] {
        let error = cli_at(&socket, line).failed(1);
        assert!(error.contains("the daemon does not answer, and VMs run"), "{error}");
        assert!(error.contains(&format!("process {} (sleep)", other.0.id())), "{error}");
        assert!(!error.contains(&format!("process {} ", spare.0.id())), "{error}");
    }
    assert!(spare.runs());
    drop(other);
    cli_at(&socket, "idle").ok();
    assert!(spare.runs());
    cli_at(&socket, "idle --end").ok();
    assert_eq!(spare.0.wait().unwrap().signal(), Some(9));
}

/// A socket that somebody holds and nobody serves: what is there cannot be known.
#[test]
fn a_daemon_that_does_not_answer_is_not_idle() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let closes = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let error = cli_at(&socket, "idle").failed(1);
    assert!(!error.is_empty());
    closes.join().unwrap();
}
