//! Processes of the host that run confined: VMMs, servers of shares, helpers, tools.
//!
//! [`spawn`] starts one in a [`jail`] and a [`cgroup`]; [`Process`] holds it by pidfd; [`strays`] finds those
//! without a record; [`confinement`] shows one as the kernel reports it. [`numa`] knows the host's
//! nodes, and [`residence`] on which of them a process's memory is; [`huge_pages`] are for memory of many processes.

pub mod cgroup;
mod child;
mod clone;
pub mod confinement;
mod cpu_time;
pub mod huge_pages;
pub mod jail;
pub mod numa;
pub mod residence;
mod seccomp;
pub mod socket;
pub mod strays;
pub mod vhost;
mod written;

pub use child::{Equipment, Exit, Process, Starting, adopt, child, find, held, is_running, spawn};
pub use cpu_time::cpu_time;
pub use written::{Written, written};
