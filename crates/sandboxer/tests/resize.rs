//! The memory and the vCPUs of a pod's VM follow the pod's limits, with doubles for the VMM and the agent. The agent's double refuses a
//! limit beyond what its guest has at that moment, as the real one does.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

mod fake_agent;
mod test_node;

use std::{fs, sync::Arc, time::Duration};

use fake_agent::FakeAgent;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use sandboxer::pod::{
    PodHandle, recover,
    spec::{Limits, PodSpec},
};
use sandboxer_base::Code;
use sandboxer_vmm_fake::{FakeVmm, Fault};
use test_node::{TestNode, id};
use tokio::time::timeout;

/// Far longer than anything these tests wait for on a busy host.
const LONG: Duration = Duration::from_secs(60);
/// Memory of the boot, and the most beside it, MiB.
const BOOT: u64 = 256;
const GROWTH: u64 = 1024;
/// vCPUs beside the one of the boot.
const MORE_VCPUS: u32 = 3;

struct Test {
    node: TestNode,
    agent: FakeAgent,
    pod: PodHandle,
}

impl Test {
    /// Starts a pod with containers `a` and `b`, each with a limit of 64 MiB, and with a limit of `all` MiB for both together.
    async fn start(all: i64, fault: Fault) -> Self {
        let agent = FakeAgent::default();
        let served = agent.clone();
        let vmm = Arc::new(FakeVmm::new(move |guest| served.serve(guest)));
        vmm.inject(fault);
        let node = TestNode::with(vmm, |config| {
            config.vm.max_memory_mib = 1 << 20;
            config.vm.hotplug_memory_mib = GROWTH;
            config.vm.max_vcpus = 8;
            config.vm.hotplug_vcpus = MORE_VCPUS;
        });
        let limits = Limits { memory_bytes: all << 20, ..Limits::default() };
        let pod = node.pod_of(PodSpec { limits, ..PodSpec::plain("web".parse().unwrap(), 1, BOOT) });
        pod.start().await.unwrap();
        for name in ["a", "b"] {
            let new = node.container(name, "true");
            let path = new.bundle.join("config.json");
            let mut spec: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            spec["linux"]["resources"] = serde_json::json!({
                "memory": { "limit": 64 << 20 }, "cpu": { "quota": 50_000, "period": 100_000 },
            });
            fs::write(&path, spec.to_string()).unwrap();
            pod.create_container(new).await.unwrap();
            pod.start_process(id(name), None).await.unwrap();
        }
        Self { node, agent, pod }
    }

    async fn limit(&self, name: &str, mib: i64) -> Result<(), sandboxer::error::PodError> {
        let resources = serde_json::json!({ "memory": { "limit": mib << 20 } });
        self.pod.update(id(name), resources.to_string().into_bytes()).await
    }

    async fn limit_all(&self, mib: i64) -> Result<(), sandboxer::error::PodError> {
        self.pod.update_pod(Limits { memory_bytes: mib << 20, ..Limits::default() }).await
    }

    async fn limit_cpu(&self, name: &str, millis: i64) -> Result<(), sandboxer::error::PodError> {
        let resources = serde_json::json!({ "cpu": { "quota": millis * 100, "period": 100_000 } });
        self.pod.update(id(name), resources.to_string().into_bytes()).await
    }

    async fn limit_cpu_of_all(&self, millis: i64) -> Result<(), sandboxer::error::PodError> {
        let cpu_quota_us = if millis < 0 { -1 } else { millis * 100 };
        self.pod.update_pod(Limits { cpu_quota_us, cpu_period_us: 100_000, memory_bytes: 0 }).await
    }

    /// Returns the guest's vCPUs.
    fn vcpus(&self) -> u32 {
        self.agent.vcpus.lock().unwrap().as_ref().map_or(0, |vcpus| *vcpus.borrow())
    }

    async fn has_vcpus(&self, count: u32) {
        let mut vcpus = self.agent.vcpus.lock().unwrap().clone().unwrap();
        timeout(LONG, vcpus.wait_for(|now| *now == count)).await.unwrap().unwrap();
    }

    /// Returns a CPU limit in the guest, thousandths of a CPU; that of all containers together has no name.
    fn limited_cpu(&self, name: &str) -> Option<u64> {
        self.agent.cpu_limits.lock().unwrap().get(name).map(|micros| micros / 1000)
    }

    /// Returns the size that the daemon shows.
    async fn shown(&self) -> (u32, u64) {
        let size = self.pod.inspect().await.unwrap().size;
        (size.vcpus, size.memory_mib)
    }

    /// Returns the guest's memory, MiB.
    fn memory(&self) -> u64 {
        self.agent.memory_mib.lock().unwrap().as_ref().map_or(0, |mib| *mib.borrow())
    }

    /// Waits until the guest has this memory, MiB.
    async fn shrinks_to(&self, mib: u64) {
        let mut memory = self.agent.memory_mib.lock().unwrap().clone().unwrap();
        timeout(LONG, memory.wait_for(|now| *now == mib)).await.unwrap().unwrap();
    }

    /// Returns a limit in the guest, MiB; that of all containers together has no name.
    fn limited(&self, name: &str) -> Option<u64> {
        self.agent.limits.lock().unwrap().get(name).map(|bytes| bytes >> 20)
    }
}

#[tokio::test]
async fn limits_of_a_pod_grow_its_vm_and_shrink_it() {
    let test = Test::start(128, Fault::None).await;
    test.limit_all(150).await.unwrap();
    assert_eq!(test.memory(), BOOT, "it fits");
    test.limit_all(512).await.unwrap();
    assert_eq!((test.memory(), test.limited("")), (BOOT + 384, Some(512)));
    test.limit_all(128).await.unwrap();
    test.shrinks_to(BOOT).await;
    assert_eq!(test.limited(""), Some(128));

    let refused = test.limit_all(4096).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert_eq!((test.memory(), test.limited("")), (BOOT, Some(128)), "it is beyond any size");
    // Without a limit, what there is stays.
    test.limit_all(512).await.unwrap();
    test.pod.update_pod(Limits { memory_bytes: -1, ..Limits::default() }).await.unwrap();
    test.limit("a", 64).await.unwrap();
    assert_eq!(test.memory(), BOOT);
}

#[tokio::test]
async fn limits_of_containers_do_the_same() {
    let test = Test::start(128, Fault::None).await;
    test.limit("a", 512).await.unwrap();
    assert_eq!((test.memory(), test.limited("a")), (BOOT + 512, Some(512)));
    assert_eq!(test.limited(""), Some(576), "the limit of all was the sum of theirs, and stays that");
    test.limit("b", 256).await.unwrap();
    assert_eq!((test.memory(), test.limited("")), (BOOT + 640, Some(768)));
    test.limit("a", 64).await.unwrap();
    test.shrinks_to(BOOT + 256).await;
    assert_eq!(test.limited(""), Some(320));
    // As kubelet does with a containerd that passes it on: first all, then each.
    test.limit_all(1024).await.unwrap();
    test.limit("a", 512).await.unwrap();
    assert_eq!((test.memory(), test.limited("")), (BOOT + 896, Some(1024)), "it is to get more");
}

#[tokio::test]
async fn cpu_limits_give_a_vm_vcpus_and_take_them() {
    let test = Test::start(128, Fault::None).await;
    test.limit_cpu_of_all(1000).await.unwrap();
    assert_eq!(test.vcpus(), 1, "it fits");
    test.limit_cpu_of_all(3500).await.unwrap();
    assert_eq!((test.vcpus(), test.limited_cpu("")), (4, Some(3500)));
    let shown = async {
        while test.shown().await != (4, BOOT) {
            tokio::task::yield_now().await
        }
    };
    timeout(LONG, shown).await.expect("the size now is shown");
    test.limit_cpu_of_all(1001).await.unwrap();
    test.has_vcpus(2).await;

    let refused = test.limit_cpu_of_all(4001).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert_eq!((test.vcpus(), test.limited_cpu("")), (2, Some(1001)), "it is beyond any size");
    // Without a limit, what there is stays.
    test.limit_cpu_of_all(-1).await.unwrap();
    assert_eq!(test.vcpus(), 2);
    test.limit_cpu("a", 100).await.unwrap();
    test.has_vcpus(1).await;
    assert_eq!(test.memory(), BOOT, "a limit of CPUs changed the memory");
}

#[tokio::test]
async fn cpu_limits_of_containers_do_the_same() {
    let test = Test::start(128, Fault::None).await;
    test.limit_cpu_of_all(1000).await.unwrap();
    test.limit_cpu("a", 1500).await.unwrap();
    assert_eq!((test.vcpus(), test.limited_cpu("a")), (2, Some(1500)));
    assert_eq!(test.limited_cpu(""), Some(2000), "the limit of all was the sum of theirs, and stays that");
    test.limit_cpu("b", 2500).await.unwrap();
    assert_eq!((test.vcpus(), test.limited_cpu("")), (4, Some(4000)));
    test.limit_cpu("a", 10_000).await.unwrap_err();
    assert_eq!((test.vcpus(), test.limited_cpu("")), (4, Some(4000)), "what was refused was done");
    test.limit_cpu("b", 500).await.unwrap();
    test.limit_cpu("a", 500).await.unwrap();
    test.has_vcpus(1).await;
    assert_eq!(test.limited_cpu(""), Some(1000));
}

#[tokio::test]
async fn a_guest_that_does_not_use_its_vcpus_is_told_and_has_them_no_more() {
    let test = Test::start(128, Fault::None).await;
    test.agent.uses_at_most.store(2, std::sync::atomic::Ordering::Relaxed);
    let refused = test.limit_cpu_of_all(4000).await.unwrap_err().to_string();
    assert!(refused.contains("its guest uses 2 of the 4 vCPUs"), "{refused}");
    assert_eq!((test.vcpus(), test.limited_cpu("")), (1, None));
    test.limit_cpu_of_all(2000).await.unwrap();
    assert_eq!(test.vcpus(), 2);
}

#[tokio::test]
async fn a_guest_that_keeps_its_vcpus_gets_no_others_before_it_gives_them_up() {
    let test = Test::start(128, Fault::KeepsVcpus).await;
    test.limit_cpu_of_all(3000).await.unwrap();
    test.limit_cpu_of_all(2000).await.unwrap();
    assert_eq!(test.vcpus(), 3);
    test.limit_cpu_of_all(1500).await.unwrap();
    let refused = test.limit_cpu_of_all(2500).await.unwrap_err().to_string();
    assert!(refused.contains("has not given up 1 vCPUs"), "{refused}");
    assert_eq!(test.limited_cpu(""), Some(1500));
}

#[tokio::test]
async fn a_container_without_a_limit_keeps_what_there_is() {
    let test = Test::start(0, Fault::None).await;
    test.limit("a", 512).await.unwrap();
    assert_eq!(test.memory(), BOOT + 512);
    test.limit("b", -1).await.unwrap();
    test.limit("a", 64).await.unwrap();
    test.limit("a", 65).await.unwrap();
    assert_eq!((test.memory(), test.limited("")), (BOOT + 512, None));
    test.limit("b", 64).await.unwrap();
    test.shrinks_to(BOOT).await;
}

#[tokio::test]
async fn a_guest_that_takes_too_little_is_told_and_nothing_changes() {
    let test = Test::start(128, Fault::PlugsAtMost(128)).await;
    let refused = test.limit_all(512).await.unwrap_err().to_string();
    assert!(refused.contains("its guest took 128 MiB of 384 MiB"), "{refused}");
    assert_eq!(test.limited(""), None);
    // It keeps what it took, and that is enough.
    test.limit_all(300).await.unwrap();
    test.limit_all(64).await.unwrap();
    assert_eq!((test.memory(), test.limited("")), (BOOT + 128, Some(64)));
}

#[tokio::test]
async fn the_next_daemon_knows_the_limits() {
    let test = Test::start(128, Fault::None).await;
    test.limit_all(512).await.unwrap();
    let recorded = async {
        let memory =
            || test.node.node.journal.records().unwrap()[0].as_ref().unwrap().spec.limits.memory_bytes;
        while memory() != 512 << 20 {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONG, recorded).await.expect("the record is written");
    let Test { node, agent, pod } = test;
    let next = node.killed([pod]);
    recover::recover(&next, recover::Records::read(&next).unwrap()).await;
    let test = Test { pod: next.registry.pods().remove(0), node, agent };
    test.limit("a", 65).await.unwrap();
    assert_eq!(test.memory(), BOOT + 384, "less than the limit of all needs");
    test.limit("a", 512).await.unwrap();
    assert_eq!(test.memory(), BOOT + 512, "that of b is known");
    test.limit("a", 65).await.unwrap();
    test.limit_all(128).await.unwrap();
    test.shrinks_to(BOOT).await;
}

/// Many at a time, as the last ones of one daemon overlap with the first ones of the next.
#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_changes_at_random_leave_the_vm_as_large_as_its_limits_need() {
    let test = Test::start(128, Fault::None).await;
    let mut random = StdRng::seed_from_u64(1);
    let mut refused = 0;
    for _ in 0..250 {
        let mut change = || (random.random_range(0..3), random.random_range(16..1400));
        let changes = [(); 4].map(|()| change()).map(async |(which, mib)| match which {
            0 => test.limit_all(mib).await,
            1 => test.limit("a", mib).await,
            _ => test.limit("b", mib).await,
        });
        let done = timeout(LONG, futures::future::join_all(changes)).await.expect("changes end");
        refused += done.iter().filter(|done| done.is_err()).count();
        // That of a container may be larger, but holds only within it.
        let all = test.limited("").unwrap_or(128);
        assert!(all <= test.memory(), "a limit of {all} MiB in a guest of {} MiB", test.memory());
        assert!((BOOT..=BOOT + GROWTH).contains(&test.memory()));
    }
    assert!((50..500).contains(&refused), "{refused} of 1000 were refused");
    for name in ["a", "b"] {
        test.limit(name, 16).await.unwrap();
    }
    test.limit_all(32).await.unwrap();
    test.shrinks_to(BOOT).await;
}
