//! The program in its jail, asked as a guest's kernel asks, and as no kernel would.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "clippy knows only the test functions themselves"
)]

#[path = "serve/confinement.rs"]
mod confinement;
#[path = "serve/disk.rs"]
mod disk;
#[path = "serve/escapes.rs"]
mod escapes;
#[path = "serve/files.rs"]
mod files;
#[path = "serve/kept.rs"]
mod kept;
#[path = "serve/kernel_double.rs"]
mod kernel_double;
#[path = "serve/semantics.rs"]
mod semantics;
#[path = "serve/server.rs"]
mod server;
#[path = "serve/squash.rs"]
mod squash;
#[path = "serve/streams.rs"]
mod streams;
#[path = "serve/vmm_double.rs"]
mod vmm_double;
