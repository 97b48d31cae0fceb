//! Compiles the library that is preloaded into VMMs. It needs neither Rust's nor C's start-up, so it is not a crate.

use std::{env, error::Error, path::PathBuf, process::Command};

const SOURCE: &str = "preload/discard.rs";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={SOURCE}");
    let variable = |name| env::var_os(name).ok_or(format!("{name} is not set"));
    let library = PathBuf::from(variable("OUT_DIR")?).join("discard.so");
    // Of another processor's target, as cargo is told it.
    let linker = env::var("RUSTC_LINKER").map(|linker| format!("linker={linker}"));
    let status = Command::new(variable("RUSTC")?)
        .args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "discard"])
        .args(["-C", "opt-level=s", "-C", "panic=abort", "-C", "strip=symbols", "-C", "link-arg=-nostdlib"])
        // Loaded at each start of a VMM: few pages, and nothing to bind later.
        .args(["-C", "link-arg=-Wl,-z,noseparate-code,-z,now,--hash-style=gnu,--build-id=none"])
        .args(linker.iter().flat_map(|linker| ["-C", linker]))
        .arg("--target")
        .arg(variable("TARGET")?)
        .arg("-o")
        .args([library, PathBuf::from(SOURCE)])
        .status()?;
    if status.success() { Ok(()) } else { Err(format!("rustc cannot compile {SOURCE}: {status}").into()) }
}
