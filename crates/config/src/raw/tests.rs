//! Tests of accepted configurations, and of error messages.

use super::*;
use crate::{Handler, StartPath, VmmName};

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("c.toml"))
}

#[test]
fn the_explained_default_is_the_default() {
    let written = parse(DEFAULT).unwrap();
    // The defaults that depend on the VM are commented out in the file.
    let built = Config {
        concurrent_starts: written.concurrent_starts,
        concurrent_containers: written.concurrent_containers,
        ..Config::default()
    };
    assert_eq!(format!("{written:?}"), format!("{built:?}"));
}

#[test]
fn the_explained_default_has_every_key() {
    // Includes the commented-out keys; the parser itself names all keys that it knows.
    let set = DEFAULT.replace("\n# ", "\n");
    let tables = [
        "vm",
        "templates",
        "checkpoints",
        "pool",
        "handlers",
        "rootfs",
        "volumes",
        "network",
        "placement",
        "limits",
        "containers",
        "containerd",
        "traces",
    ];
    for table in [
        "",
        "vm",
        "templates",
        "checkpoints",
        "pool",
        "rootfs",
        "volumes",
        "network",
        "placement",
        "limits",
        "containers",
        "containerd",
        "traces",
    ] {
        let header = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
        let error = toml::from_str::<Raw>(&format!("{header}zz = 1")).unwrap_err();
        let mut known = error.message().split('`').skip(3).step_by(2).peekable();
        assert!(known.peek().is_some(), "{error}");
        let section = &set[set.find(&header).unwrap() + header.len()..];
        let section = section.split("\n[").next().unwrap();
        for key in known.filter(|key| !tables.contains(key)) {
            let explained = section.lines().any(|line| line.starts_with(&format!("{key} = ")));
            assert!(explained, "{table}.{key} is not in the explained default");
        }
    }
}

#[test]
fn what_containers_have_of_their_node_is_checked() {
    let text = "[containers]\nrlimits = { nofile = [1024, -1] }\nsysctls = {}\nnode_sysctls = [\"vm.max_map_count\"]";
    let containers = parse(text).unwrap().containers;
    assert_eq!(containers.rlimits, [("RLIMIT_NOFILE".to_owned(), [1024, u64::MAX])].into());
    assert!(containers.sysctls.is_empty() && containers.node_sysctls == ["vm.max_map_count"]);
    for (line, says) in [
        ("rlimits = { files = [1, 2] }", "containers.rlimits is files = [1, 2]"),
        ("rlimits = { core = [2, 1] }", "containers.rlimits is core = [2, 1]"),
        ("sysctls = { \"../x\" = \"1\" }", "containers.sysctls is \"../x\""),
        ("node_sysctls = [\"\"]", "containers.node_sysctls is \"\""),
    ] {
        let error = parse(&format!("[containers]\n{line}")).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn the_configurations_of_one_vmm_are_right_and_explain_each_line() {
    for (text, vmm) in [
        (include_str!("../../../../vmm-configs/cloud-hypervisor.toml"), VmmChoice::CloudHypervisor),
        (include_str!("../../../../vmm-configs/firecracker.toml"), VmmChoice::Firecracker),
        (include_str!("../../../../vmm-configs/qemu.toml"), VmmChoice::Qemu),
    ] {
        let config = parse(text).unwrap();
        assert_eq!(config.vm.vmm, vmm);
        let lines: Vec<_> = text.lines().collect();
        for pair in lines.windows(2).filter(|pair| pair[1].contains(" = ")) {
            // Keys that share a comment stand together.
            let of_one = ["default_vcpus", "max =", "min ="];
            let explained = pair[0].starts_with("# ") || of_one.iter().any(|key| pair[0].starts_with(key));
            assert!(explained, "{vmm:?}: `{}` is not explained", pair[1]);
        }
    }
}

#[test]
fn a_handler_is_a_start_path_or_a_table() {
    let text = "[handlers]\ncold = \"boot\"\nfc = { vmm = \"firecracker\" }\n[handlers.ch]\nvmm = \"cloud-hypervisor\"\n\
                start_path = \"template\"\n[handlers.fc-2]\nvmm = \"firecracker\"";
    let config = parse(text).unwrap();
    let handler = |start_path, vmm| Handler { start_path, vmm };
    assert_eq!(config.handlers["cold"], handler(StartPath::Boot, None));
    assert_eq!(config.handlers["fc"], handler(StartPath::Pool, Some(VmmName::Firecracker)));
    assert_eq!(config.handlers["ch"], handler(StartPath::Template, Some(VmmName::CloudHypervisor)));
    let named = config.named_vmms().into_iter().collect::<Vec<_>>();
    assert_eq!(named, [(VmmName::CloudHypervisor, "ch"), (VmmName::Firecracker, "fc")]);
    assert_eq!(config.choice_of(VmmName::Firecracker), VmmChoice::Firecracker);
    assert_eq!(config.choice_of(VmmName::Qemu), VmmChoice::Auto);
}

#[test]
fn a_handler_that_makes_no_sense_is_told() {
    for (text, says) in [
        ("a = \"bot\"", "did you mean \"boot\"?"),
        ("a = { vmm = \"firecraker\" }", "did you mean \"firecracker\"?"),
        // A handler has no choice of VMM: that is vm.vmm.
        ("a = { vmm = \"auto\" }", "unknown value `auto`, expected one of `qemu`"),
        ("a = { vm = \"qemu\" }", "did you mean \"vmm\"?"),
        ("a = 5", "expected a start path in quotes, or a table with vmm and start_path"),
    ] {
        let error = parse(&format!("[handlers]\n{text}")).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("line 2"), "{error}");
    }
}

#[test]
fn a_default_beyond_the_node_and_a_bound_below_it_go_together() {
    let vm = parse("[vm]\ndefault_vcpus = 4000\ndefault_memory_mib = 100000000").unwrap().vm;
    assert_eq!((vm.default_vcpus, vm.max_vcpus), (4000, 4000));
    assert_eq!((vm.default_memory_mib, vm.max_memory_mib), (100_000_000, 100_000_000));
    let vm = parse("[vm]\nmax_vcpus = 1\nmax_memory_mib = 128").unwrap().vm;
    assert_eq!((vm.default_vcpus, vm.default_memory_mib), (1, 128));
}

#[test]
fn an_unknown_key_is_an_error_that_suggests_the_nearest() {
    let text = parse("[vm]\nkernal = \"/k\"\n").unwrap_err().to_string();
    assert!(text.contains("kernal") && text.contains("did you mean \"kernel\"?"), "{text}");
    assert!(text.contains("line 2"), "{text}");
    let text = parse("[vm]\nvmm = \"cloud-hypervizor\"\n").unwrap_err().to_string();
    assert!(text.contains("did you mean \"cloud-hypervisor\"?"), "{text}");
    let text = parse("[vm]\naccelerator = \"tgc\"\n").unwrap_err().to_string();
    assert!(text.contains("did you mean \"tcg\"?"), "{text}");
    assert!(!parse("[vm]\nzzzzzzzz = 1\n").unwrap_err().to_string().contains("did you mean"));
}

#[test]
fn a_value_of_another_kind_is_told_in_words_of_the_file() {
    for (text, says) in [
        (
            "\ndrain_timeout = \"5s\"",
            "line 2, column 17: invalid type: string \"5s\", expected a number of seconds, in `drain_timeout = \"5s\"`",
        ),
        ("[vm]\ndefault_vcpus = -1", "expected a whole number, in `default_vcpus"),
        ("run_dir = 5", "expected a path in quotes"),
        ("[vm", "line 1, column 4: unclosed table"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn there_is_no_pool_without_templates() {
    assert!(!parse("[templates]\nenabled = false").unwrap().templates.enabled, "there is no pool by default");
    let error = parse("[templates]\nenabled = false\n[pool]\nmin = 1").unwrap_err().to_string();
    assert!(error.contains("pool.max is 1, expected 0 while templates.enabled is false"), "{error}");
    assert!(parse("[vm]\njail = true").unwrap().vm.jail);
    let error = parse("[vm]\njail = false").unwrap_err().to_string();
    assert!(error.contains("vm.jail is false, expected only true: every VMM is jailed"), "{error}");
}

#[test]
fn values_out_of_bounds_name_their_key_and_what_it_takes() {
    for (text, key) in [
        ("run_dir = \"run\"", "run_dir"),
        ("concurrent_starts = 0", "concurrent_starts"),
        ("[vm]\ndefault_vcpus = 0", "vm.default_vcpus"),
        ("[vm]\ndefault_memory_mib = 8", "vm.default_memory_mib"),
        ("[vm]\nhotplug_memory_mib = 100", "vm.hotplug_memory_mib"),
        ("[vm]\nhotplug_vcpus = 64", "vm.hotplug_vcpus"),
        ("[vm]\nboot_timeout = -1.0", "vm.boot_timeout"),
        ("[vm]\nboot_timeout = nan", "vm.boot_timeout"),
        ("[templates]\nmax = 0", "templates.max"),
        ("[checkpoints]\nmax_mib = 0", "checkpoints.max_mib"),
        ("[checkpoints]\nmax_age_hours = 87601", "checkpoints.max_age_hours"),
        ("[checkpoints]\nshare_from = [\"a/b\"]", "checkpoints.share_from"),
        ("[pool]\nmax = 2\nmin = 3", "pool.min"),
        ("[templates]\nenabled = false\n[pool]\nmax = 8", "pool.max"),
        ("[rootfs]\ncache_mib = 0", "rootfs.cache_mib"),
        ("[rootfs]\nwritable_mib = 1", "rootfs.writable_mib"),
        ("[volumes]\nempty_dir_mib = 1", "volumes.empty_dir_mib"),
        ("[limits]\ndisk_bps = 0", "limits.disk_bps"),
        ("[limits]\ndisk_iops = 9", "limits.disk_iops"),
        ("[limits]\nnet_bps_rx = 0", "limits.net_bps_rx"),
        ("[limits]\nnet_bps_tx = 16383", "limits.net_bps_tx"),
        ("[containerd]\nttrpc = \"ttrpc.sock\"", "containerd.ttrpc"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(&format!("{key} is ")), "{text}: {error}");
        let line = text.lines().count();
        assert!(error.contains(&format!("\"c.toml\", line {line}, column ")), "{text}: {error}");
    }
}

#[test]
fn reserved_cpus_are_a_list_of_cpus() {
    let reserved = |list: &str| {
        parse(&format!("[placement]\nreserved_cpus = {list:?}")).map(|config| config.placement.reserved_cpus)
    };
    assert_eq!(reserved("0-1,4").unwrap().unwrap().to_string(), "0-1,4");
    assert_eq!(reserved("").unwrap(), None);
    let error = reserved("0-").unwrap_err().to_string();
    assert!(error.contains("line 2") && error.contains("placement.reserved_cpus is \"0-\""), "{error}");
    let error = parse("[placement]\npolicy = \"num\"").unwrap_err().to_string();
    assert!(error.contains("did you mean \"numa\"?"), "{error}");
    assert_eq!(parse("[placement]\npolicy = \"off\"").unwrap().placement.policy, crate::PlacementPolicy::Off);
}

#[test]
fn huge_pages_are_for_hosts_without_a_pool() {
    let parse_with_pool = |pool: &str| parse(&format!("{pool}[placement]\nhuge_pages = true"));
    assert!(!parse("").unwrap().placement.huge_pages);
    assert!(parse_with_pool("").unwrap().placement.huge_pages);
    let error = parse_with_pool("[pool]\nmax = 2\n").unwrap_err().to_string();
    assert!(error.contains("line 4") && error.contains("placement.huge_pages is true"), "{error}");
    assert!(error.contains("pool.max"), "{error}");
}

#[test]
fn checkpoints_stay_for_ever_and_in_their_namespaces_unless_told_otherwise() {
    let checkpoints = |keys: &str| parse(&format!("[checkpoints]\n{keys}")).unwrap().checkpoints;
    assert_eq!((checkpoints("").max_age, checkpoints("max_age_hours = 0").max_age), (None, None));
    let config = checkpoints("max_mib = 2\nmax_age_hours = 2\nshare_from = [\"golden\"]");
    assert_eq!((config.most_bytes, config.max_age.unwrap().as_secs()), (2 << 20, 7200));
    assert_eq!(config.share_from, ["golden"]);
}

#[test]
fn traces_go_to_one_collector_or_nowhere() {
    assert_eq!(parse("[traces]\nsampling_ratio = 0.5").unwrap().traces, None);
    let traces = parse("[traces]\nendpoint = \"http://127.0.0.1:4317\"").unwrap().traces.unwrap();
    assert_eq!((traces.endpoint.as_str(), traces.sampling_ratio), ("http://127.0.0.1:4317", 1.0));
    for (bad, expected) in [
        ("endpoint = \"https://collector:4317\"", "without TLS"),
        ("endpoint = \"127.0.0.1:4317\"", "traces.endpoint"),
        ("sampling_ratio = 1.5", "traces.sampling_ratio is 1.5, expected 0 to 1"),
        ("sampling = 1", "sampling_ratio"),
    ] {
        let error = parse(&format!("[traces]\n{bad}")).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("line 2"), "{error}");
    }
}
