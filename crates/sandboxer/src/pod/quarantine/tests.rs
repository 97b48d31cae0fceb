//! Tests of the quarantine: put aside, show, release and destroy, in directories of the test's own.

use std::{
    os::unix::process::ExitStatusExt,
    process::{Child, Command},
};

use super::*;

/// A daemon's directories, with a torn record in the journal.
struct Place {
    dir: tempfile::TempDir,
    config: Config,
    quarantine: Quarantine,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let config =
        Config { run_dir: dir.path().join("run"), state_dir: dir.path().join("state"), ..Config::default() };
    fs::create_dir_all(journal::dir(&config.state_dir)).unwrap();
    let quarantine = Quarantine::of(&config);
    Place { dir, config, quarantine }
}

impl Place {
    /// Puts a record of these bytes aside; returns its original path and the entry's name.
    fn put_aside(&self, file: &str, text: &[u8]) -> (PathBuf, String) {
        let path = journal::dir(&self.config.state_dir).join(file);
        fs::write(&path, text).unwrap();
        let before = self.names();
        self.quarantine.put_aside(&journal::parse(text, &path).unwrap_err(), false).unwrap();
        assert!(!path.exists());
        let name = self.names().into_iter().find(|name| !before.contains(name)).unwrap();
        (path, name)
    }

    fn names(&self) -> Vec<String> {
        let entries = self.quarantine.list().unwrap().entries;
        entries.into_iter().map(|entry| entry.name.to_string()).collect()
    }

    fn run_dir(&self, pod: &str) -> PathBuf {
        let dir = self.config.run_dir.join("pods").join(pod);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("console.log"), "words").unwrap();
        dir
    }
}

/// Starts a process that stands in for a VMM.
fn sleeper(run_dir: &Path) -> Child {
    Command::new("sleep").arg("60").env(strays::MARK, run_dir).spawn().unwrap()
}

#[test]
fn a_record_is_kept_as_it_was_and_what_is_known_of_its_pod_is_reported() {
    let place = place();
    let run_dir = place.run_dir("web");
    let mut vmm = sleeper(&run_dir);
    let torn = b"{\"version\":1,\xff";
    let (path, name) = place.put_aside("web.json", torn);
    assert!(name.ends_with("-web"), "{name}");
    let record = place.config.state_dir.join(DIR).join(format!("{name}.json"));
    assert_eq!(fs::read(record).unwrap(), torn);

    let (entry, report, record) = place.quarantine.show(&name).unwrap();
    assert_eq!((entry.bytes, record.as_str()), (14, "{\"version\":1,\u{fffd}"));
    let pod = Some("web".parse().unwrap());
    assert_eq!((&entry.pod, entry.at_ns > 0), (&pod, true));
    let seen = Seen { pid: vmm.id(), command: "sleep".into() };
    let left = Left { run_dir: run_dir.clone(), run_dir_exists: true, processes: vec![seen] };
    assert_eq!(entry.left, left);
    let written: Report = serde_json::from_str(&report).unwrap();
    assert_eq!(entry.report.as_ref(), Some(&written));
    assert_eq!(
        (written.at_ns, &written.path, &written.pod, &written.left),
        (entry.at_ns, &path, &pod, &left)
    );
    assert!(
        written.problem.contains("web.json") && written.problem.contains("column"),
        "{}",
        written.problem
    );
    assert_eq!(place.quarantine.pids().unwrap(), [vmm.id()]);
    assert!(vmm.try_wait().unwrap().is_none(), "what was only looked at was ended");
    vmm.kill().unwrap();
    vmm.wait().unwrap();
    // The findings now, and at that time.
    let (entry, _, _) = place.quarantine.show(&name).unwrap();
    assert_eq!((entry.left.processes, entry.report.unwrap().left), (vec![], left));
}

#[test]
fn a_released_record_is_where_it_was_and_replaces_none() {
    let place = place();
    let text = br#"{"version":99,"later":true}"#;
    let before = journal::dir(&place.config.state_dir).join("later.before");
    fs::write(&before, "an older one").unwrap();
    let (path, name) = place.put_aside("later.json", text);
    assert!(!before.exists(), "the next daemon would take it for the pod's record");
    fs::write(&path, "another").unwrap();
    let refused = place.quarantine.release(&name).unwrap_err();
    assert!(matches!(refused, QuarantineError::Recorded { .. }), "{refused}");
    assert_eq!((fs::read(&path).unwrap().as_slice(), place.names()), (&b"another"[..], vec![name.clone()]));
    fs::remove_file(&path).unwrap();
    place.quarantine.release(&name).unwrap();
    assert_eq!(fs::read(&path).unwrap(), text);
    assert_eq!(fs::read(&before).unwrap(), b"an older one");
    let left: Vec<_> = fs::read_dir(place.config.state_dir.join(DIR)).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    let unknown = place.quarantine.release(&name).unwrap_err();
    assert!(matches!(unknown, QuarantineError::Unknown(_)), "{unknown}");
}

#[test]
fn destroying_ends_that_pod_alone_and_leaves_nothing_of_it() {
    let place = place();
    let (run_dir, others) = (place.run_dir("web"), place.run_dir("web-2"));
    let (mut vmm, mut other) = (sleeper(&run_dir), sleeper(&others));
    fs::write(journal::dir(&place.config.state_dir).join("web.before"), "{").unwrap();
    let (_, name) = place.put_aside("web.json", b"{");
    let known = HashSet::from(["web".parse().unwrap()]);
    let refused = place.quarantine.destroy(&name, &known).unwrap_err();
    assert!(matches!(refused, QuarantineError::InUse { .. }), "{refused}");
    let prefix = place.quarantine.destroy(&name[..name.len() - 1], &HashSet::new()).unwrap_err();
    assert!(matches!(prefix, QuarantineError::Unknown(_)), "{prefix}");
    assert!(vmm.try_wait().unwrap().is_none() && run_dir.exists(), "what was refused was done");

    let destroyed = place.quarantine.destroy(&name, &HashSet::new()).unwrap();
    assert_eq!(destroyed.left.processes.len(), 1);
    assert_eq!(vmm.wait().unwrap().signal(), Some(9));
    assert!(!run_dir.exists() && others.join("console.log").exists());
    assert!(place.names().is_empty());
    assert_eq!(fs::read_dir(place.config.state_dir.join(DIR)).unwrap().count(), 0);
    assert!(other.try_wait().unwrap().is_none(), "another pod's VMM was ended");
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn names_never_leave_the_directory() {
    let place = place();
    let victim = place.dir.path().join("state/victim.json");
    fs::write(&victim, "mine").unwrap();
    place.put_aside("web.json", b"{");
    for name in ["../victim", "/etc/passwd", "", ".", "..", "a/b", "a\0b", &"a".repeat(200)] {
        let known = HashSet::new();
        let errors = [
            place.quarantine.show(name).map(drop).unwrap_err(),
            place.quarantine.release(name).map(drop).unwrap_err(),
            place.quarantine.destroy(name, &known).map(drop).unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, QuarantineError::Name(_)), "{name:?}: {error}");
        }
    }
    assert_eq!(fs::read_to_string(victim).unwrap(), "mine");
}

#[test]
fn a_record_that_is_no_pods_is_kept_and_can_be_destroyed_but_not_put_back() {
    let place = place();
    let (path, name) = place.put_aside("..no pod.json", b"{");
    let (entry, _, _) = place.quarantine.show(&name).unwrap();
    assert_eq!((entry.pod, entry.left, entry.report.unwrap().path), (None, Left::default(), path));
    let refused = place.quarantine.release(&name).unwrap_err();
    assert!(matches!(refused, QuarantineError::NoPod(_)), "{refused}");
    place.quarantine.destroy(&name, &HashSet::new()).unwrap();
    assert!(place.names().is_empty());
}

#[test]
fn what_is_told_is_bounded() {
    let place = place();
    let (_, name) = place.put_aside("long.json", &[b'x'; 100_000]);
    fs::remove_file(place.quarantine.report_path(&name.parse().unwrap())).unwrap();
    let (entry, report, record) = place.quarantine.show(&name).unwrap();
    assert_eq!((entry.bytes, record.len(), report.as_str()), (100_000, 64 << 10, ""));
    assert!(entry.report.is_none());
    for number in 0..MAX_LISTED {
        fs::write(place.quarantine.dir.join(format!("{number}-p.json")), "12").unwrap();
    }
    let listed = place.quarantine.list().unwrap();
    assert_eq!((listed.entries.len(), listed.left_off, listed.bytes), (MAX_LISTED, 1, 101_000));
}

#[test]
fn what_is_mounted_in_a_run_directory_is_not_removed_with_it() {
    let place = place();
    let run_dir = place.run_dir("web");
    let elsewhere = place.dir.path().join("elsewhere");
    let shown = run_dir.join("shown");
    for dir in [&elsewhere, &shown] {
        fs::create_dir(dir).unwrap();
    }
    fs::write(elsewhere.join("file"), "mine").unwrap();
    nix::mount::mount(Some(&elsewhere), &shown, None::<&str>, nix::mount::MsFlags::MS_BIND, None::<&str>)
        .unwrap();
    assert!(shown.join("file").exists());
    let (_, name) = place.put_aside("web.json", b"{");
    place.quarantine.destroy(&name, &HashSet::new()).unwrap();
    assert!(!run_dir.exists());
    assert_eq!(fs::read_to_string(elsewhere.join("file")).unwrap(), "mine");
}
