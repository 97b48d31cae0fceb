use super::*;

pub fn record(id: &str) -> PodRecord {
    PodRecord {
        version: RECORD_VERSION,
        readable_from: None,
        spec: PodSpec::plain(id.parse().unwrap(), 1, 128),
        status: PodStatus::created(1),
        link_key: LinkKey::random(),
        vm: None,
        containers: Vec::new(),
        volumes: Vec::new(),
        restored: None,
        placement: None,
        shares: None,
    }
}

#[tokio::test]
async fn an_older_record_never_lands_over_a_newer_one_nor_after_removal() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(dir.path()).unwrap();
    let pod = journal.pod(&"a".parse().unwrap());
    let mut newer = record("a");
    newer.spec.name = "newer".into();
    pod.write(2, newer).await.unwrap();
    pod.write(1, record("a")).await.unwrap();
    let found = journal.records().unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].as_ref().unwrap().spec.name, "newer");
    pod.remove().await.unwrap();
    pod.write(3, record("a")).await.unwrap();
    assert!(journal.records().unwrap().is_empty());
}

#[tokio::test]
async fn the_record_before_is_there_for_a_torn_one_and_goes_with_the_pod() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(dir.path()).unwrap();
    let (pod, path) = (journal.pod(&"a".parse().unwrap()), dir.path().join("pods/a.json"));
    let as_of = |number: u32, state| {
        let mut record = record("a");
        (record.spec.vcpus, record.status.state) = (number, state);
        record
    };
    let tear = |path: &Path| {
        let whole = fs::read(path).unwrap();
        fs::write(path, &whole[..whole.len() / 2]).unwrap();
    };
    let found = || journal.records().unwrap().remove(0);

    pod.write(1, as_of(1, PodState::Starting)).await.unwrap();
    assert!(!before(&path).exists());
    pod.write(2, as_of(2, PodState::Ready)).await.unwrap();
    tear(&path);
    assert!(journal.instead_of(&found().unwrap_err()).is_none(), "it wasn't ready then");

    pod.write(3, as_of(3, PodState::Ready)).await.unwrap();
    pod.write(4, as_of(4, PodState::Ready)).await.unwrap();
    tear(&path);
    let torn = found().unwrap_err();
    assert_eq!(journal.instead_of(&torn).unwrap().spec.vcpus, 3);
    // A later daemon's record is valid; do not go back behind it.
    let later = JournalError::Version { path: path.clone(), found: 99 };
    assert!(journal.instead_of(&later).is_none());
    // The daemon may have died before or after the torn record was put aside.
    fs::remove_file(&path).unwrap();
    Journal::open(dir.path()).unwrap();
    assert_eq!(found().unwrap().spec.vcpus, 3);
    assert!(!before(&path).exists());

    pod.write(5, as_of(5, PodState::Ready)).await.unwrap();
    tear(&path);
    tear(&before(&path));
    assert!(journal.instead_of(&found().unwrap_err()).is_none());
    pod.write(6, as_of(6, PodState::Ready)).await.unwrap();
    pod.remove().await.unwrap();
    assert_eq!(fs::read_dir(dir.path().join("pods")).unwrap().count(), 0);
}

/// As on a file system without hard links: a record is written even if the previous one cannot be kept.
#[tokio::test]
async fn a_record_is_written_whose_predecessor_cannot_be_kept() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(dir.path()).unwrap();
    let (pod, path) = (journal.pod(&"a".parse().unwrap()), dir.path().join("pods/a.json"));
    pod.write(1, record("a")).await.unwrap();
    fs::create_dir(before(&path)).unwrap();
    keep(&path).unwrap_err();
    let mut next = record("a");
    next.spec.name = "next".into();
    pod.write(2, next).await.unwrap();
    assert_eq!(journal.records().unwrap().remove(0).unwrap().spec.name, "next");
    let unreadable =
        JournalError::Io { action: "read", path: path.clone(), source: io::ErrorKind::Other.into() };
    assert!(journal.instead_of(&unreadable).is_none());
    assert!(!path.with_extension("new").exists(), "half a record is left");
}

#[test]
fn a_record_of_version_1_is_understood_with_the_process_of_its_shares() {
    let mut old = serde_json::to_value(record("old")).unwrap();
    old["version"] = 1.into();
    old["shares"] = serde_json::json!({ "pid": 7, "start_time": 9 });
    for later in ["host_ports", "limits"] {
        assert!(old["spec"].as_object_mut().unwrap().remove(later).is_some());
    }
    let text = serde_json::to_vec(&old).unwrap();
    let read = parse(&text, Path::new("old.json")).unwrap();
    assert_eq!(read.shares, Some(ShareRecord { pid: 7, start_time: 9, transport: None, key: None }));
    // The written record has this version, and no further fields.
    let written = serde_json::to_value(&PodRecord { version: RECORD_VERSION, ..read }).unwrap();
    assert!(written.get("shares").is_none());
}

/// A record written by the previous release. A change here breaks rollbacks of this release.
const OF_THE_RELEASE_BEFORE: &str = include_str!("record-2.json");

#[test]
fn a_record_is_for_the_release_before_too() {
    let read = parse(OF_THE_RELEASE_BEFORE.as_bytes(), Path::new("web.json")).unwrap();
    assert_eq!((read.containers.len(), read.volumes.len()), (1, 4));
    // That release rejects unknown fields: none may be written for a pod with its features.
    let written = serde_json::to_value(PodRecord { version: RECORD_VERSION, ..read }).unwrap();
    let before: serde_json::Value = serde_json::from_str(OF_THE_RELEASE_BEFORE).unwrap();
    assert_eq!(written, before);
}

#[test]
fn a_later_record_is_read_if_it_says_that_it_can_be() {
    let mut later: serde_json::Value = serde_json::from_str(OF_THE_RELEASE_BEFORE).unwrap();
    later["version"] = (RECORD_VERSION + 1).into();
    for at in ["", "/spec", "/status", "/machine", "/containers/0", "/containers/0/init", "/volumes/0"] {
        later.pointer_mut(at).unwrap()["new"] = "of a later release".into();
    }
    let read = |record: &serde_json::Value| parse(record.to_string().as_bytes(), Path::new("web.json"));
    let refused = read(&later).unwrap_err();
    assert!(matches!(refused, JournalError::Version { found: 3, .. }), "{refused}");
    later["readable_from"] = (RECORD_VERSION + 1).into();
    let refused = read(&later).unwrap_err();
    assert!(matches!(refused, JournalError::Version { found: 3, .. }), "{refused}");
    later["readable_from"] = RECORD_VERSION.into();
    let read = read(&later).unwrap();
    assert_eq!((read.vm.unwrap().pid, read.containers.len(), read.volumes.len()), (4711, 1, 4));
}

#[test]
fn torn_foreign_and_newer_records_are_told_apart_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let journal = Journal::open(dir.path()).unwrap();
    let pods = dir.path().join("pods");
    let whole = serde_json::to_string(&record("torn")).unwrap();
    fs::write(pods.join("torn.json"), &whole[..whole.len() / 2]).unwrap();
    fs::write(pods.join("later.json"), r#"{"version":99,"something":"new"}"#).unwrap();
    fs::write(pods.join("half.new"), "x").unwrap();
    let mut errors: Vec<_> =
        journal.records().unwrap().into_iter().map(|r| r.unwrap_err().to_string()).collect();
    errors.sort();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].contains("later.json") && errors[0].contains("version 99"), "{errors:?}");
    assert!(errors[1].contains("torn.json"), "{errors:?}");
    Journal::open(dir.path()).unwrap();
    let mut left: Vec<_> = fs::read_dir(&pods).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["later.json", "torn.json"]);
}
