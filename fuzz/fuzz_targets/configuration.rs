//! A configuration. One that is taken keeps the bounds that its documentation names.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sandboxer_config::Config;

fuzz_target!(|text: &str| {
    match Config::parse(text, Path::new("fuzzed.toml")) {
        Ok(config) => {
            assert!(config.run_dir.is_absolute() && config.state_dir.is_absolute());
            assert!(config.vm.default_memory_mib <= config.vm.max_memory_mib);
            assert!(config.vm.default_vcpus <= config.vm.max_vcpus);
        }
        Err(error) => assert!(error.to_string().contains("fuzzed.toml")),
    }
});
