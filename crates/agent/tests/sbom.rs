//! The list of what is in the guest image, which is given on with it, is of this image.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use sandboxer_base::digest;
use serde_json::Value;

fn guest(file: &str) -> PathBuf {
    let dir = match std::env::var_os("SANDBOXER_TEST_GUEST_DIR") {
        Some(dir) => dir.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest"),
    };
    dir.join(file)
}

fn components() -> Vec<Value> {
    let text = fs::read(guest("sbom.cdx.json")).unwrap();
    let bom: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!((&bom["bomFormat"], &bom["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));
    bom["components"].as_array().unwrap().clone()
}

fn named<'a>(components: &'a [Value], name: &str) -> &'a Value {
    components.iter().find(|component| component["name"] == name).unwrap_or_else(|| panic!("no {name}"))
}

/// Returns the crates whose sources the program names, as `name-version`: in the places of panics.
fn crates_in(program: &[u8]) -> BTreeSet<String> {
    const REGISTRY: &[u8] = b"/registry/src/";
    let mut found = BTreeSet::new();
    for at in (0..program.len() - REGISTRY.len()).filter(|at| program[*at..].starts_with(REGISTRY)) {
        let rest = &program[at + REGISTRY.len()..];
        let name = rest.split(|&byte| byte == b'/').nth(1).unwrap_or_default();
        found.insert(String::from_utf8_lossy(name).into_owned());
    }
    found
}

#[test]
fn every_crate_that_the_agent_names_is_listed() {
    let listed: BTreeSet<String> = components()
        .iter()
        .map(|part| format!("{}-{}", part["name"].as_str().unwrap(), part["version"].as_str().unwrap()))
        .collect();
    let used = crates_in(&fs::read(guest("initramfs.cpio")).unwrap());
    assert!(used.len() > 20, "{used:?}");
    let unlisted: Vec<_> = used.difference(&listed).collect();
    assert!(unlisted.is_empty(), "in the agent, and not in the list: {unlisted:?}");
}

#[test]
fn hashes_and_sources_are_those_of_the_image() {
    let components = components();
    let kernel = named(&components, "linux");
    let sum = digest::sha256(&mut fs::File::open(guest("vmlinux")).unwrap()).unwrap();
    assert_eq!(kernel["hashes"][0]["content"], sum.as_str());
    assert!(named(&components, "sandboxer-agent")["hashes"][0]["content"].is_string());
    let from_source = |source: &str| {
        let is_of = |part: &&Value| part["purl"].as_str().is_some_and(|purl| purl.starts_with(source));
        components.iter().filter(is_of).collect::<Vec<_>>()
    };
    // What is linked into a static program, of Debian's.
    for library in ["glibc", "libseccomp", "gcc-"] {
        assert_eq!(from_source(&format!("pkg:deb/debian/{library}")).len(), 1, "{library}");
    }
    for part in from_source("pkg:cargo/") {
        assert_eq!(part["hashes"][0]["content"].as_str().map(str::len), Some(64), "{part}");
    }
}
