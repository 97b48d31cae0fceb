//! The agent as PID 1 of a real guest, driven over the real link.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "clippy knows only the test functions themselves"
)]

#[path = "guest/container.rs"]
mod container;
#[path = "guest/execs.rs"]
mod execs;
#[path = "guest/lifecycle.rs"]
mod lifecycle;
#[path = "guest/limits.rs"]
mod limits;
#[path = "guest/link.rs"]
mod link;
#[path = "guest/refusals.rs"]
mod refusals;
#[path = "guest/shares.rs"]
mod shares;
#[path = "guest/streams.rs"]
mod streams;
#[path = "guest/vm.rs"]
mod vm;
#[path = "guest/volumes.rs"]
mod volumes;
