//! Guests that really boot, with the agent of the guest image.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::net::UnixListener,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use sandboxer_config::VmConfig;
use sandboxer_protocol::{
    agent::ConfigurePodRequest,
    link::LinkKey,
    share::{Head, REQUEST_HEAD, SLOTS, opcode, u32_at},
};
use sandboxer_vmm::{MEMORY, ShareTransport, Vm, VmSpec, Vmm, cloud_hypervisor::CloudHypervisor};

use super::{Case, LONG, Outcome, Subject, kvm_unusable, skipped, trial};
use crate::{
    listed,
    test_guest::{
        Pod,
        contract::{GROWTH_MIB, GROWTH_VCPUS, memory_follows, sealed, vcpus_follow},
        guest_image, has_open,
        share_server::KEY,
        vm_config,
    },
};

pub fn trials() -> Vec<Trial> {
    let cases: [Case; _] = listed![
        the_agent_is_ready_and_the_guest_powers_off,
        the_agent_is_greeted_anew_by_the_next_daemon,
        a_disk_is_let_go_of,
        memory_comes_and_goes,
        vcpus_come_and_go,
        a_copy_of_a_frozen_vm_answers_its_agent,
        a_guest_asks_for_files_by_streams_that_the_daemon_has_no_part_in,
    ];
    let ready = match (Subject::real(), kvm_unusable()) {
        (_, Some(why)) => Err(why.to_owned()),
        (None, _) => Err("CLOUD_HYPERVISOR names no binary".into()),
        _ if !guest_image("initramfs.cpio").exists() => {
            Err("there is no guest: run `make guest-image`".into())
        }
        (Some(real), None) => Ok(real),
    };
    cases
        .into_iter()
        .map(|case| match &ready {
            Ok(real) => trial("boots_a_pod", real, case),
            Err(why) => skipped(&format!("boots_a_pod::{}", case.0), why.clone()),
        })
        .collect()
}

/// A copy that has nothing to wait for has answered and is configured within this time.
const AT_ONCE: Duration = Duration::from_millis(200);

/// Returns whether this node's clock counts instructions.
fn is_virtual_time() -> bool {
    std::env::var("SANDBOXER_CLOCK").is_ok_and(|clock| clock == "virtual")
}

/// The VM of a pod, not running yet.
struct Guest {
    config: VmConfig,
    vmm: CloudHypervisor,
    spec: VmSpec,
    // Its files are removed with it.
    pod: Pod,
}

impl Guest {
    async fn of(subject: &Subject) -> Result<Self> {
        let (pod, config) = (Pod::new("boots"), vm_config());
        let spec = pod.spec_of(guest_image("vmlinux"), guest_image("initramfs.cpio"));
        Ok(Self { vmm: subject.vmm(&pod, config.clone()).await?, config, spec, pod })
    }

    async fn greet(&self, vm: &dyn Vm) -> Result<sandboxer_guest::Agent> {
        let greeting =
            sandboxer_guest::connect(&self.spec.pod, vm, &self.spec.boot.link_key, self.config.agent_timeout);
        let (agent, ready) = tokio::time::timeout(LONG, greeting).await.context("the agent is silent")??;
        ensure!(!ready.kernel_release.is_empty(), "{ready:?}");
        Ok(agent)
    }
}

async fn the_agent_is_ready_and_the_guest_powers_off(subject: Subject) -> Result<Outcome> {
    let guest = Guest::of(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    let agent = guest.greet(vm.as_ref()).await?;
    agent.configure_pod(ConfigurePodRequest { hostname: "pod".into(), ..Default::default() }).await?;
    agent.power_off().await;
    let exit = tokio::time::timeout(LONG, vm.exited()).await.context("the guest is still on")?;
    ensure!(exit.how == "exited with status 0", "{exit:?}");
    vm.kill().await?;
    Ok(Outcome::Done)
}

async fn the_agent_is_greeted_anew_by_the_next_daemon(subject: Subject) -> Result<Outcome> {
    let guest = Guest::of(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    guest.greet(vm.as_ref()).await?;
    let record = vm.record();
    drop(vm);
    let vm = guest.vmm.adopt(&record).await?.context("the VM outlived its handle")?;
    guest.greet(vm.as_ref()).await?;
    vm.kill().await?;
    Ok(Outcome::Done)
}

/// As a template is built and used: a session is open at the freeze, and each copy is greeted.
async fn a_copy_of_a_frozen_vm_answers_its_agent(subject: Subject) -> Result<Outcome> {
    let guest = Guest::of(&subject).await?;
    let dir = guest.pod.path("frozen");
    fs::create_dir(&dir)?;
    let spec = VmSpec { memory_file: Some(dir.join(MEMORY)), ..guest.spec.clone() };
    let vm = guest.vmm.boot(&spec).await?;
    let session = guest.greet(vm.as_ref()).await?;
    let kept = guest.pod.disk("kept");
    vm.attach_disk(&kept).await?;
    drop(session);
    vm.freeze(&dir).await?;
    vm.kill().await?;
    let frozen = sealed(dir);
    for name in ["one", "two"] {
        let pod = Pod::new(name);
        let own = pod.disk("kept");
        let spec = VmSpec { run_dir: pod.path("run"), disks: vec![own.clone()], ..guest.spec.clone() };
        let copy = guest.vmm.restore(&spec, &frozen).await?;
        let has = |disk| has_open(copy.record().pid, disk);
        ensure!(has(&own)? && !has(&kept)?, "copy {name} does not have a disk of its own");
        copy.resume().await?;
        let resumed = Instant::now();
        let agent = guest.greet(copy.as_ref()).await.with_context(|| format!("copy {name}"))?;
        agent.configure_pod(ConfigurePodRequest { hostname: name.into(), ..Default::default() }).await?;
        // A guest whose clock was set back answers only once it reaches its template's value. In virtual time a limit
        // counts instructions, so there is no other cause.
        let took = resumed.elapsed();
        ensure!(took < AT_ONCE || !is_virtual_time(), "copy {name} answered {took:?} after its resumption");
        copy.attach_disk(&pod.disk("late")).await?;
        copy.kill().await?;
    }
    Ok(Outcome::Done)
}

async fn a_guest_asks_for_files_by_streams_that_the_daemon_has_no_part_in(
    subject: Subject,
) -> Result<Outcome> {
    let guest = Guest::of(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    let agent = guest.greet(vm.as_ref()).await?;
    let listener = vm.listen_for_shares()?;
    ensure!(listener.transport == ShareTransport::Streams, "{listener:?}");
    vm.connect_shares().await?;
    ensure!(agent.mount_shares("", Some(&KEY)).await?, "the agent carries no requests");
    drop(agent);
    let serve = tokio::task::spawn_blocking(move || answer_one(&UnixListener::from(listener.socket)));
    let asked = tokio::time::timeout(LONG, serve).await.context("the guest asks for nothing")???;
    ensure!(asked == opcode::INIT, "the first request is of kind {asked}");
    vm.kill().await?;
    Ok(Outcome::Done)
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

async fn a_disk_is_let_go_of(subject: Subject) -> Result<Outcome> {
    let guest = Guest::of(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    guest.greet(vm.as_ref()).await?;
    let disk = guest.pod.disk("late");
    vm.attach_disk(&disk).await?;
    vm.detach_disk("late").await?;
    vm.attach_disk(&disk).await.context("its serial is free again")?;
    vm.kill().await?;
    Ok(Outcome::Done)
}

/// A guest that booted, and a copy, as the agent in them sees it.
async fn memory_comes_and_goes(subject: Subject) -> Result<Outcome> {
    let guest = Guest::of(&subject).await?;
    let spec = VmSpec { growth_mib: GROWTH_MIB, ..guest.spec.clone() };
    let vm = guest.vmm.boot(&spec).await?;
    follows_requests(&guest, vm.as_ref()).await?;
    vm.kill().await?;

    let (template, copy) = (Pod::new("template"), Pod::new("copy"));
    let dir = template.path("frozen");
    fs::create_dir(&dir)?;
    let frozen =
        VmSpec { run_dir: template.path("run"), memory_file: Some(dir.join(MEMORY)), ..spec.clone() };
    let vm = guest.vmm.boot(&frozen).await?;
    drop(guest.greet(vm.as_ref()).await?);
    vm.freeze(&dir).await?;
    vm.kill().await?;
    let vm = guest.vmm.restore(&VmSpec { run_dir: copy.path("run"), ..spec }, &sealed(dir)).await?;
    vm.resume().await?;
    follows_requests(&guest, vm.as_ref()).await?;
    vm.kill().await?;
    Ok(Outcome::Done)
}

/// A guest that booted, and a copy, as the agent in them brings vCPUs online.
async fn vcpus_come_and_go(subject: Subject) -> Result<Outcome> {
    let guest = Guest::of(&subject).await?;
    let spec = VmSpec { growth_vcpus: GROWTH_VCPUS, ..guest.spec.clone() };
    let vm = guest.vmm.boot(&spec).await?;
    brings_vcpus_online(&guest, vm.as_ref()).await?;
    vm.kill().await?;

    let (template, copy) = (Pod::new("template"), Pod::new("copy"));
    let dir = template.path("frozen");
    fs::create_dir(&dir)?;
    let frozen =
        VmSpec { run_dir: template.path("run"), memory_file: Some(dir.join(MEMORY)), ..spec.clone() };
    let vm = guest.vmm.boot(&frozen).await?;
    drop(guest.greet(vm.as_ref()).await?);
    vm.freeze(&dir).await?;
    vm.kill().await?;
    let vm = guest.vmm.restore(&VmSpec { run_dir: copy.path("run"), ..spec }, &sealed(dir)).await?;
    vm.resume().await?;
    brings_vcpus_online(&guest, vm.as_ref()).await?;
    vm.kill().await?;
    Ok(Outcome::Done)
}

async fn brings_vcpus_online(guest: &Guest, vm: &dyn Vm) -> Result<()> {
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
    Ok(())
}

async fn follows_requests(guest: &Guest, vm: &dyn Vm) -> Result<()> {
    let agent = guest.greet(vm).await?;
    let seen = async || agent.stats(None).await.expect("the agent answers").memory_limit >> 20;
    memory_follows(vm, seen).await;
    Ok(())
}
