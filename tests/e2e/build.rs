//! Builds the static program that a case runs in a container.

use std::{env, path::PathBuf, process::Command};

fn main() {
    let source = "src/splice.c";
    println!("cargo::rerun-if-changed={source}");
    let program = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("splice");
    let built = Command::new("gcc").args(["-static", "-O", "-o"]).arg(&program).arg(source).status();
    let built = built.unwrap_or_else(|error| panic!("cannot run gcc: {error}: run scripts/install-deps.sh"));
    assert!(built.success(), "gcc {source}: {built}");
}
