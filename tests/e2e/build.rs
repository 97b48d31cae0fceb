//! Builds the static programs that cases run in a container.

use std::{env, path::PathBuf, process::Command};

fn main() -> Result<(), String> {
    let dir = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets no OUT_DIR")?);
    ["splice", "files", "look"].iter().try_for_each(|name| {
        let source = format!("src/{name}.c");
        println!("cargo::rerun-if-changed={source}");
        let built =
            Command::new("gcc").args(["-static", "-O", "-o"]).arg(dir.join(name)).arg(&source).status();
        let built = built.map_err(|error| format!("cannot run gcc: {error}: run scripts/install-deps.sh"))?;
        if built.success() { Ok(()) } else { Err(format!("gcc {source}: {built}")) }
    })
}
