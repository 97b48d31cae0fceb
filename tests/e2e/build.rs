//! Builds the static program that a case runs in a container.

use std::{env, path::PathBuf, process::Command};

fn main() -> Result<(), String> {
    let source = "src/splice.c";
    println!("cargo::rerun-if-changed={source}");
    let dir = env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?;
    let program = PathBuf::from(dir).join("splice");
    let built = Command::new("gcc").args(["-static", "-O", "-o"]).arg(&program).arg(source).status();
    let built = built.map_err(|error| format!("cannot run gcc: {error}: run scripts/install-deps.sh"))?;
    if built.success() { Ok(()) } else { Err(format!("gcc {source}: {built}")) }
}
