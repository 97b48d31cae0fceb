//! Invalid containers: each error names its cause, and nothing remains.

use sandboxer_protocol::agent::{CreateContainerRequest, ListContainersRequest, Rootfs, rootfs::Writable};
use serde_json::json;
use ttrpc::Code;

use crate::{
    container::*,
    vm::{BUSYBOX, SCRATCH, Vm},
};

#[tokio::test]
async fn what_cannot_be_created_says_why() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let plain = || spec(shell("exit"));
    let mut winged = plain();
    winged["process"]["capabilities"]["effective"] = json!(["CAP_FLY"]);
    let mut odd_mount = plain();
    odd_mount["mounts"]
        .as_array_mut()
        .unwrap()
        .push(json!({"destination": "/x", "type": "nosuchfs", "source": "none"}));
    let mut asks = plain();
    asks["linux"]["seccomp"] = json!({"defaultAction": "SCMP_ACT_NOTIFY"});
    let mut garbage = container("bad", &plain());
    garbage.spec_json = b"{]".to_vec();
    let mut escaping = container("bad", &plain());
    escaping.files = vec![file("/../etc/x", "", false)];
    let mut odd_disk = container("bad", &plain());
    odd_disk.rootfs =
        Some(Rootfs { writable: Some(Writable::Whole(disk(SCRATCH, "xfs", false))), ..Default::default() })
            .into();
    let mut not_erofs = container("bad", &plain());
    let lower = vec![disk(SCRATCH, "erofs", true)];
    let writable = container("bad", &plain()).rootfs.writable.clone();
    not_erofs.rootfs = Some(Rootfs { lower, writable, ..Default::default() }).into();

    let cases: Vec<(&str, CreateContainerRequest, Code, &str)> = vec![
        ("id", container("../bad", &plain()), Code::INVALID_ARGUMENT, "container_id: identifier \"../bad\""),
        ("json", garbage, Code::INVALID_ARGUMENT, "spec is not a valid OCI runtime spec"),
        (
            "capability",
            container("bad", &winged),
            Code::INVALID_ARGUMENT,
            "effective: unknown capability \"CAP_FLY\"",
        ),
        (
            "program",
            container("bad", &spec(command(&["nosuch"]))),
            Code::FAILED_PRECONDITION,
            "exec: \"nosuch\": executable file not found in $PATH",
        ),
        ("mount", container("bad", &odd_mount), Code::INTERNAL, "nosuchfs"),
        ("seccomp", container("bad", &asks), Code::INVALID_ARGUMENT, "SCMP_ACT_NOTIFY"),
        ("file", escaping, Code::INVALID_ARGUMENT, "/../etc/x"),
        ("fstype", odd_disk, Code::INVALID_ARGUMENT, "disk \"scratch\": file system \"xfs\""),
        ("disk content", not_erofs, Code::INTERNAL, "as erofs"),
    ];
    for (name, request, code, why) in cases {
        let (answered, words) = refusal(patiently(agent.create_container(ctx(), &request)).await);
        eprintln!("{name}: {words}");
        assert!(answered == code && words.contains(why), "{name}: {answered:?}: {words}");
        let listed = patiently(agent.list_containers(ctx(), &ListContainersRequest::new())).await.unwrap();
        assert!(listed.processes.is_empty(), "{name}: {listed}");
    }

    // The same identifier can be used again, and the disks are not busy.
    let mut good = container("bad", &spec(shell("ls /sys/fs/cgroup | wc -l; echo fine")));
    let lower = vec![disk(BUSYBOX, "erofs", true)];
    good.rootfs = Some(Rootfs {
        lower,
        writable: Some(Writable::Overlay(disk(SCRATCH, "ext4", false))),
        ..Default::default()
    })
    .into();
    let process = run(&agent, &good).await;
    assert!(process.stdout().await.ends_with("fine\n"));
    end(&agent, "bad").await;
}

#[tokio::test]
async fn a_program_that_is_none_fails_the_start() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let request = container("web", &spec(command(&["rubbish"])));
    patiently(agent.create_container(ctx(), &request)).await.unwrap();
    let process = init(&agent, "web");
    for _ in 0..2 {
        let (code, words) = refusal(process.start().await);
        assert_eq!(
            (code, words.as_str()),
            (Code::FAILED_PRECONDITION, r#"exec: "/bin/rubbish": exec format error"#)
        );
    }
    assert_ne!(process.wait().await.code, 0);
    delete(&agent, "web").await.unwrap();

    let mut heavy = spec(shell("exit"));
    heavy["process"]["env"] = json!(["PATH=/bin", format!("BIG={}", "x".repeat(3 << 20))]);
    patiently(agent.create_container(ctx(), &container("web", &heavy))).await.unwrap();
    let (_, words) = refusal(process.start().await);
    assert_eq!(words, r#"exec: "/bin/sh": argument list too long"#);
    process.wait().await;
    delete(&agent, "web").await.unwrap();
}

#[tokio::test]
async fn a_disk_that_never_comes_is_named_with_those_that_are_there() {
    let vm = Vm::boot();
    let (agent, _) = vm.session().await;
    let mut request = container("web", &spec(shell("exit")));
    request.rootfs.mut_or_insert_default().lower = vec![disk("nowhere", "erofs", true)];
    let (code, words) = refusal(patiently(agent.create_container(ctx(), &request)).await);
    assert_eq!(code, Code::DEADLINE_EXCEEDED);
    for part in ["\"nowhere\"", "\"busybox\"", "\"scratch\""] {
        assert!(words.contains(part), "{words}");
    }
}
