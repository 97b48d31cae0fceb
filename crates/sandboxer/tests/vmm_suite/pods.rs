//! Guests that really boot, with the agent of the guest image.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use sandboxer_config::VmConfig;
use sandboxer_guest::Agent;
use sandboxer_protocol::agent::ConfigurePodRequest;
use sandboxer_vmm::{Frozen, MEMORY, Vm, VmSpec, Vmm};

use super::{Case, LONG, Subject, on_real};
use crate::{
    listed,
    test_guest::{
        Pod,
        contract::{GROWTH_MIB, memory_follows, sealed},
        guest_image, has_open, vm_config,
    },
};

/// Returns the trials of a VMM: the cases of all VMMs, and its `own`.
pub fn trials<S: Subject>(own: impl IntoIterator<Item = Case<S>>) -> Vec<Trial> {
    let all: [Case<S>; _] = listed![
        the_agent_is_ready_and_the_guest_powers_off,
        the_agent_is_greeted_anew_by_the_next_daemon,
        memory_comes_and_goes,
    ];
    let missing = !guest_image("initramfs.cpio").exists();
    let missing = missing.then(|| "there is no guest: run `make guest-image`".into());
    on_real("boots_a_pod", all.into_iter().chain(own), missing)
}

/// The VM of a pod, not running yet.
pub struct Guest<S: Subject> {
    pub config: VmConfig,
    pub vmm: S::Vmm,
    pub spec: VmSpec,
    // Its files are removed with it.
    pub pod: Pod,
}

impl<S: Subject> Guest<S> {
    pub async fn prepare(subject: &S) -> Result<Self> {
        let (pod, config) = (Pod::new("boots"), vm_config());
        let spec = pod.spec_of(guest_image("vmlinux"), guest_image("initramfs.cpio"));
        Ok(Self { vmm: subject.vmm(&pod, config.clone()).await?, config, spec, pod })
    }

    pub async fn greet(&self, vm: &dyn Vm) -> Result<Agent> {
        let greeting =
            sandboxer_guest::connect(&self.spec.pod, vm, &self.spec.boot.link_key, self.config.agent_timeout);
        let greeted = tokio::time::timeout(LONG, greeting).await;
        let console = vm.last_lines().await;
        let (agent, ready) = greeted.with_context(|| format!("the agent is silent: {console:#?}"))??;
        ensure!(!ready.kernel_release.is_empty(), "{ready:?}");
        Ok(agent)
    }

    /// Freezes a VM of `spec` in `dir`, after `before`. A session is open at the freeze, as when a template is built.
    async fn frozen(
        &self,
        spec: &VmSpec,
        pod: &Pod,
        before: impl AsyncFnOnce(&dyn Vm) -> Result<()>,
    ) -> Result<Frozen> {
        let dir = pod.path("frozen");
        fs::create_dir(&dir)?;
        let memory_file = Some(dir.join(MEMORY));
        let vm = self.vmm.boot(&VmSpec { run_dir: pod.path("run"), memory_file, ..spec.clone() }).await?;
        let session = self.greet(vm.as_ref()).await?;
        before(vm.as_ref()).await?;
        drop(session);
        vm.freeze(&dir).await?;
        vm.kill().await?;
        Ok(sealed(dir))
    }

    /// Looks at a guest that booted, and at a copy of a frozen one.
    pub async fn booted_and_copied(
        &self,
        spec: VmSpec,
        look: impl AsyncFn(&dyn Vm) -> Result<()>,
    ) -> Result<()> {
        let vm = self.vmm.boot(&spec).await?;
        look(vm.as_ref()).await?;
        vm.kill().await?;

        let (template, copy) = (Pod::new("template"), Pod::new("copy"));
        let frozen = self.frozen(&spec, &template, async |_| anyhow::Ok(())).await?;
        let vm = self.vmm.restore(&VmSpec { run_dir: copy.path("run"), ..spec }, &frozen).await?;
        vm.resume().await?;
        look(vm.as_ref()).await?;
        Ok(vm.kill().await?)
    }

    /// Greets two copies of a frozen VM that has a disk, and has `look` at each, of which it knows how long it took to
    /// be configured.
    pub async fn copies_answer(
        &self,
        look: impl AsyncFn(&Agent, &dyn Vm, &Pod, Duration) -> Result<()>,
    ) -> Result<()> {
        let template_disk = self.pod.disk("kept");
        let frozen = self
            .frozen(&self.spec, &self.pod, async |vm| anyhow::Ok(vm.attach_disk(&template_disk).await?))
            .await?;
        for name in ["one", "two"] {
            let pod = Pod::new(name);
            let own = pod.disk("kept");
            let spec = VmSpec { run_dir: pod.path("run"), disks: vec![own.clone()], ..self.spec.clone() };
            let copy = self.vmm.restore(&spec, &frozen).await?;
            let has = |disk| has_open(copy.record().pid, disk);
            ensure!(has(&own)? && !has(&template_disk)?, "copy {name} does not have a disk of its own");
            copy.resume().await?;
            let resumed = Instant::now();
            let agent = self.greet(copy.as_ref()).await.with_context(|| format!("copy {name}"))?;
            agent.configure_pod(ConfigurePodRequest { hostname: name.into(), ..Default::default() }).await?;
            let took = resumed.elapsed();
            look(&agent, copy.as_ref(), &pod, took).await.with_context(|| format!("copy {name}"))?;
            copy.kill().await?;
        }
        Ok(())
    }
}

async fn the_agent_is_ready_and_the_guest_powers_off<S: Subject>(subject: S) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    let agent = guest.greet(vm.as_ref()).await?;
    agent.configure_pod(ConfigurePodRequest { hostname: "pod".into(), ..Default::default() }).await?;
    agent.power_off().await;
    let exit = tokio::time::timeout(LONG, vm.exited()).await.context("the guest is still on")?;
    ensure!(exit.how == "exited with status 0", "{exit:?}");
    Ok(vm.kill().await?)
}

async fn the_agent_is_greeted_anew_by_the_next_daemon<S: Subject>(subject: S) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let vm = guest.vmm.boot(&guest.spec).await?;
    guest.greet(vm.as_ref()).await?;
    let record = vm.record();
    drop(vm);
    let vm = guest.vmm.adopt(&record).await?.context("the VM outlived its handle")?;
    guest.greet(vm.as_ref()).await?;
    Ok(vm.kill().await?)
}

/// A guest that booted, and a copy, as the agent in them sees it.
async fn memory_comes_and_goes<S: Subject>(subject: S) -> Result<()> {
    let guest = Guest::prepare(&subject).await?;
    let spec = VmSpec { growth_mib: GROWTH_MIB, ..guest.spec.clone() };
    let follows_requests = async |vm: &dyn Vm| {
        let agent = guest.greet(vm).await?;
        let seen = async || agent.stats(None).await.expect("the agent answers").memory_limit >> 20;
        memory_follows(vm, seen).await;
        anyhow::Ok(())
    };
    guest.booted_and_copied(spec, follows_requests).await
}
