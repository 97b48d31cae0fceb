//! How the daemon is linked.

fn main() {
    // Half a million bytes of relocations, mapped as long as the daemon runs, become a bitmap (DT_RELR: glibc 2.36).
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    println!("cargo::rerun-if-changed=build.rs");
}
