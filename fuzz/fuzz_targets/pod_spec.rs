//! A sandbox request: `PodSandboxConfig` with its annotations, and what containerd keeps of it.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use prost::Message;
use sandboxer::fuzzing::pod_spec;
use sandboxer_process::cgroup::Hierarchies;
use sandboxer_config::Config;
use sandboxer_protocol::controller::{ControllerCreateRequest, types::Sandbox};

static CONFIG: LazyLock<Config> = LazyLock::new(Config::default);
/// None: what the host says of a pod's group is not of the input.
static GROUPS: LazyLock<Hierarchies> = LazyLock::new(Hierarchies::default);

fuzz_target!(|input: (String, Vec<u8>, Vec<u8>)| {
    let (sandbox_id, options, kept) = input;
    let any = |value| prost_types::Any { type_url: String::new(), value };
    let extensions = [("metadata".to_owned(), any(kept))].into();
    let request = ControllerCreateRequest {
        sandbox_id,
        options: Some(any(options)),
        sandbox: Some(Sandbox { extensions, ..Default::default() }),
        ..Default::default()
    };
    let Ok(pod) = pod_spec(&request, &CONFIG, &GROUPS) else { return };
    assert_eq!(pod.id.as_str(), request.sandbox_id);
    assert!((1..=CONFIG.vm.max_vcpus).contains(&pod.vcpus));
    assert!((64..=CONFIG.vm.max_memory_mib).contains(&pod.memory_mib));
    assert!(pod.hostname.len() <= 64);
    // It is kept in the journal, and found again.
    let record = serde_json::to_vec(&pod).expect("a pod is JSON");
    serde_json::from_slice::<sandboxer::pod::spec::PodSpec>(&record).expect("and JSON is a pod");
    let _ = request.encode_to_vec();
});
