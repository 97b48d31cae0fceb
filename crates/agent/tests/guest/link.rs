//! The link when the host speaks another protocol, disconnects in the middle of a message, or closes it.

use std::time::Duration;

use sandboxer_protocol::{
    PROTOCOL_VERSION,
    agent::{OutputStream, PowerOffRequest, ReadOutputRequest},
    link::{self, LinkError},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::timeout,
};

use crate::{container::*, vm::Vm};

#[tokio::test]
async fn a_host_of_another_version_is_told_both_and_the_right_one_is_served() {
    let vm = Vm::boot();
    let mut port = vm.port().await;
    let nonce = [9; 8];
    let key: Vec<u8> =
        (0..64).step_by(2).map(|at| u8::from_str_radix(&vm.key.to_hex()[at..at + 2], 16).unwrap()).collect();
    let hello = [&key[..], &nonce, &(PROTOCOL_VERSION + 41).to_be_bytes()].concat();
    port.write_all(&hello).await.unwrap();
    let mut welcome = Vec::new();
    patiently(async {
        while !String::from_utf8_lossy(&welcome).contains("use the initramfs") {
            port.read_buf(&mut welcome).await.unwrap();
        }
    })
    .await;
    let words = String::from_utf8_lossy(&welcome).into_owned();
    assert!(
        words.contains(&format!(
            "guest speaks agent protocol {PROTOCOL_VERSION}, host speaks {}",
            PROTOCOL_VERSION + 41
        )),
        "{words}"
    );
    drop(port);

    let (_, ready) = vm.session().await;
    assert_eq!(ready.agent_version, env!("CARGO_PKG_VERSION"));
    assert!(
        ready.init_ns > 0 && ready.ready_ns >= ready.init_ns && !ready.kernel_release.is_empty(),
        "{ready}"
    );
}

#[tokio::test]
async fn a_stranger_without_the_key_gets_no_answer() {
    let vm = Vm::boot();
    let mut port = vm.port().await;
    let stranger = sandboxer_protocol::link::LinkKey::random();
    let answer = timeout(Duration::from_secs(5), link::greet(&mut port, &stranger)).await;
    assert!(answer.is_err() || matches!(answer, Ok(Err(LinkError::Io(_)))), "a stranger was welcomed");
    drop(port);
    vm.session().await;
}

#[tokio::test]
async fn a_transfer_goes_on_where_the_last_host_left_it() {
    let vm = Vm::boot();
    // Lines that contain their position: 180 kB.
    let script = "i=0; while [ $i -lt 20000 ]; do printf '%08d\\n' $i; i=$((i+1)); done";
    run(&vm.session().await.0, &container("web", &spec(shell(script)))).await;
    let mut all = Vec::new();
    for host in 0.. {
        let (agent, _) = vm.session().await;
        let process = init(&agent, "web");
        let (mut ended, mut calls) = (false, 0);
        while !ended && calls < 3 + host {
            let (data, end) = process.read(OutputStream::STDOUT, all.len() as u64, 7001).await.unwrap();
            all.extend(data);
            ended = end;
            calls += 1;
        }
        if ended {
            break;
        }
        // Disconnected in the middle of a response: requested, never read.
        let request = ReadOutputRequest {
            container_id: "web".into(),
            offset: all.len() as u64,
            max_bytes: 60_000,
            ..Default::default()
        };
        let _ = timeout(Duration::from_millis(1), agent.read_output(ctx(), &request)).await;
    }
    let expected: String = (0..20000).map(|i| format!("{i:08}\n")).collect();
    assert_eq!(all.len(), expected.len());
    assert!(all == expected.as_bytes(), "bytes were lost or doubled");

    let (agent, _) = vm.session().await;
    let request = ReadOutputRequest { container_id: "web".into(), resume: true, ..Default::default() };
    let resumed = patiently(agent.read_output(ctx(), &request)).await.unwrap();
    assert!(resumed.end && resumed.offset + resumed.data.len() as u64 == expected.len() as u64);
    assert_eq!(init(&agent, "web").wait().await.code, 0, "the process outlived its hosts");
}

#[tokio::test]
async fn power_off_ends_the_guest() {
    let mut vm = Vm::boot();
    let (agent, _) = vm.session().await;
    run(&agent, &container("web", &spec(shell("trap '' TERM; while :; do sleep 1; done")))).await;
    let power_off = tokio::spawn(async move { agent.power_off(ctx(), &PowerOffRequest::new()).await });
    assert!(vm.ends().await.success());
    power_off.abort();
}
