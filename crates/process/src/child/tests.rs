//! Tests of processes that are started and end.

use super::*;

#[tokio::test]
async fn a_process_is_born_in_its_control_groups() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["cpu", "memory"].map(|name| dir.path().join(name));
    let procs = paths.iter().map(|path| File::create(path).unwrap()).collect();
    let groups = CgroupEntries { procs, dir: None };
    // The child sees what was written before it began.
    let look = ["-c", "cat cpu memory >&2"].map(OsString::from).to_vec();
    let equipment = Equipment { groups, ..Equipment::default() };
    let (process, words) = spawn(Path::new("/bin/sh"), look, dir.path(), equipment).unwrap();
    assert_eq!(process.exited().await, Exit::Status(0));
    assert_eq!(io::read_to_string(File::from(words)).unwrap(), "00");
}

#[tokio::test]
async fn a_process_that_cannot_enter_its_control_group_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let groups = CgroupEntries { procs: vec![File::open("/dev/null").unwrap()], dir: None };
    let equipment = Equipment { groups, ..Equipment::default() };
    let error = spawn(Path::new("/bin/true"), Vec::new(), dir.path(), equipment).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBADF), "{error}");
}
