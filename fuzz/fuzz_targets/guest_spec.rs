//! Translates an OCI spec for a guest. The result is valid and names nothing of the host.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sandboxer::{fuzzing::guest_spec, pod::spec::PodSpec};
use serde_json::{Value, json};

fn pod() -> PodSpec {
    let pod = json!({
        "id": "fuzzed", "name": "fuzzed", "namespace": "default", "uid": "u", "hostname": "fuzzed",
        "netns": null, "resolv_conf": null, "sysctls": {}, "vcpus": 1, "memory_mib": 128,
    });
    serde_json::from_value(pod).expect("what isn't said has its default")
}

fuzz_target!(|text: &[u8]| {
    // Sources of binds are read: nothing of this host's is for a fuzzer to look at.
    if text.windows(4).any(|word| word.eq_ignore_ascii_case(b"bind")) {
        return;
    }
    let (pod, container) = (pod(), "c".parse().expect("an id"));
    let Ok(guest) = guest_spec(&pod, &container, text) else { return };
    let spec: Value = serde_json::from_slice(&guest.json).expect("what comes out is JSON");
    for namespace in spec.pointer("/linux/namespaces").and_then(Value::as_array).into_iter().flatten() {
        assert!(namespace.get("path").is_none(), "{namespace}");
    }
    for absent in ["/hooks", "/hostname", "/annotations", "/linux/cgroupsPath", "/process/apparmorProfile"] {
        assert!(spec.pointer(absent).is_none_or(Value::is_null), "{absent} is {:?}", spec.pointer(absent));
    }
});
