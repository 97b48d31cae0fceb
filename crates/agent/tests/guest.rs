//! The agent as PID 1 of a real guest, driven over the real link.

#[path = "guest/container.rs"]
mod container;
#[path = "guest/lifecycle.rs"]
mod lifecycle;
#[path = "guest/vm.rs"]
mod vm;
