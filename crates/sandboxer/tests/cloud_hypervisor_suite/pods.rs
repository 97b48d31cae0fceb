//! Guests that really boot, with the agent of the guest image, as only Cloud Hypervisor has them.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::{fs::MetadataExt, net::UnixListener},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use sandboxer_guest::Agent;
use sandboxer_protocol::{
    agent::ConfigurePodRequest,
    link::LinkKey,
    share::{Head, REQUEST_HEAD, SLOTS, opcode, u32_at},
};
use sandboxer_vmm::{Destination, DiskSpec, MEMORY, ShareTransport, Vm, VmSpec, Vmm};

use super::{CloudHypervisor, tap};
use crate::{
    listed,
    test_guest::{
        Pod,
        contract::{GROWTH_VCPUS, sealed, vcpus_follow},
        has_open,
        share_server::KEY,
    },
    vmm_suite::{Case, LONG, pods, pods::Guest},
};

pub fn trials() -> Vec<Trial> {
    let own: [Case<CloudHypervisor>; _] = listed![
        a_disk_is_let_go_of,
        vcpus_come_and_go,
        a_copy_of_a_frozen_vm_answers_its_agent,
        a_saved_vm_keeps_its_session_and_its_copies_answer,
        a_guest_asks_for_files_by_streams_that_the_daemon_has_no_part_in,
    ];
    pods::trials(own)
}

/// A copy that has nothing to wait for has answered and is configured within this time.
const AT_ONCE: Duration = Duration::from_millis(200);

/// Returns whether this node's clock counts instructions.
fn is_virtual_time() -> bool {
    std::env::var("SANDBOXER_CLOCK").is_ok_and(|clock| clock == "virtual")
}

/// As a template is built and used.
async fn a_copy_of_a_frozen_vm_answers_its_agent(subject: CloudHypervisor) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let answers_at_once = async |_: &Agent, copy: &dyn Vm, pod: &Pod, took: Duration| {
        // A guest whose clock was set back answers only once it reaches its template's value. In virtual time a limit
        // counts instructions, so there is no other cause.
        ensure!(took < AT_ONCE || !is_virtual_time(), "it answered {took:?} after its resumption");
        Ok(copy.attach_disk(&pod.disk("late")).await?)
    };
    guest.copies_answer(answers_at_once).await
}

/// A VM that booted, and a copy, which is saved again. A session is open, as when a pod is saved.
async fn a_saved_vm_keeps_its_session_and_its_copies_answer(subject: CloudHypervisor) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let first = guest.pod.disk("kept");
    let tapped = |spec: VmSpec| anyhow::Ok(VmSpec { nics: 1, taps: vec![Arc::new(tap::open()?)], ..spec });
    let mut vm = guest.vmm.boot(&tapped(guest.spec.clone())?).await?;
    let mut agent = guest.greet(vm.as_ref()).await?;
    agent.configure_pod(ConfigurePodRequest { hostname: "saved".into(), ..Default::default() }).await?;
    vm.attach_disk(&first).await?;
    let (mut pods, mut kept) = (Vec::new(), first);
    for name in ["copy", "copy-of-copy"] {
        let pod = Pod::new(name);
        let to = Destination { dir: pod.path("saved"), memory_mib: guest.spec.memory_mib };
        fs::create_dir(&to.dir)?;
        let began = Instant::now();
        vm.checkpoint(&to, &[kept.record()]).await?;
        let written = began.elapsed();
        vm.resume().await?;
        let used = fs::metadata(to.dir.join(MEMORY))?.blocks() / 2048;
        println!("saved within {written:?}: {used} MiB of {} MiB", guest.spec.memory_mib);
        agent.stats(None).await.context("the session of the VM that was saved")?;
        let frozen = sealed(to.dir);
        kept = DiskSpec { serial: "kept".into(), ..pod.disk("own") };
        let spec = VmSpec { run_dir: pod.path("run"), disks: vec![kept.clone()], ..guest.spec.clone() };
        let copy = guest.vmm.restore(&tapped(spec)?, &frozen).await?;
        ensure!(has_open(copy.record().pid, &kept)?, "{name} does not have a disk of its own");
        copy.resume().await?;
        let at_copy = guest.greet(copy.as_ref()).await.with_context(|| name.to_owned())?;
        at_copy.configure_pod(ConfigurePodRequest { hostname: name.into(), ..Default::default() }).await?;
        copy.attach_disk(&pod.disk("late")).await?;
        agent.stats(None).await.context("the session of the VM that was saved, beside a copy")?;
        vm.kill().await?;
        (vm, agent) = (copy, at_copy);
        vm.detach_disk("late").await?;
        pods.push(pod);
    }
    Ok(vm.kill().await?)
}

async fn a_guest_asks_for_files_by_streams_that_the_daemon_has_no_part_in(
    subject: CloudHypervisor,
) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    let agent = guest.greet(vm.as_ref()).await?;
    let listener = vm.listen_for_shares()?;
    ensure!(listener.transport == ShareTransport::Streams, "{listener:?}");
    vm.connect_shares().await?;
    ensure!(agent.mount_shares("", Some(&KEY)).await?, "the agent carries no requests");
    drop(agent);
    let serve = tokio::task::spawn_blocking(move || answer_one(&UnixListener::from(listener.socket)));
    let opcode = tokio::time::timeout(LONG, serve).await.context("the guest asks for nothing")???;
    ensure!(opcode == opcode::INIT, "the first request is of kind {opcode}");
    Ok(vm.kill().await?)
}

/// Accepts all streams, which begin with the key. Returns the kind of the first request; that stream then fails.
fn answer_one(listener: &UnixListener) -> io::Result<u32> {
    let (sender, receiver) = mpsc::channel();
    for _ in 0..SLOTS {
        let (mut stream, _) = listener.accept()?;
        let sender = sender.clone();
        thread::spawn(move || {
            let mut begun = [0; LinkKey::LEN + REQUEST_HEAD];
            let heard = stream.read_exact(&mut begun[..LinkKey::LEN]).and_then(|()| {
                // The test fails by what is sent then.
                assert_eq!(begun[..LinkKey::LEN], KEY.as_bytes()[..], "another key");
                stream.read_exact(&mut begun[LinkKey::LEN..])
            });
            let request = &begun[LinkKey::LEN..];
            let kind = u32_at(request, 4).unwrap_or_default();
            let head = Head { opcode: kind, unique: u64::from(u32_at(request, 8).unwrap_or_default()) };
            let _ =
                sender.send(heard.and_then(|()| stream.write_all(&head.failed(libc::ENOSYS))).map(|()| kind));
        });
    }
    receiver.recv().map_err(io::Error::other)?
}

async fn a_disk_is_let_go_of(subject: CloudHypervisor) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    guest.greet(vm.as_ref()).await?;
    let disk = guest.pod.disk("late");
    vm.attach_disk(&disk).await?;
    vm.detach_disk("late").await?;
    vm.attach_disk(&disk).await.context("its serial is free again")?;
    Ok(vm.kill().await?)
}

/// A guest that booted, and a copy, as the agent in them brings vCPUs online.
async fn vcpus_come_and_go(subject: CloudHypervisor) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let spec = VmSpec { growth_vcpus: GROWTH_VCPUS, ..guest.spec.clone() };
    let brings_vcpus_online = async |vm: &dyn Vm| {
        let agent = guest.greet(vm).await?;
        let seen = async |count| loop {
            let online = agent.online_cpus(count).await.expect("the agent answers");
            // It gives CPUs up when its kernel gets to it.
            if online <= count {
                return online;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        vcpus_follow(vm, seen).await;
        anyhow::Ok(())
    };
    guest.booted_and_copied(spec, brings_vcpus_online).await
}
