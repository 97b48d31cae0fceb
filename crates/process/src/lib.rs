//! Processes of the host that run confined: VMMs, servers of shares, helpers, tools.
//!
//! [`spawn`] starts a process in a [`jail`] and a [`cgroup`]; [`Process`] holds it by pidfd; [`strays`] finds
//! processes without a record; [`confinement`] shows a process as the kernel reports it. [`numa`] describes the host's
//! nodes, [`residence`] the nodes that hold a process's memory, and [`huge_pages`] the memory of many processes.

pub mod cgroup;
mod child;
mod clone;
pub mod confinement;
mod cpu_time;
pub mod huge_pages;
pub mod jail;
pub mod numa;
pub mod residence;
pub mod rlimits;
mod seccomp;
pub mod socket;
pub mod strays;
pub mod vhost;
mod written;

pub use child::{Equipment, Exit, Process, Starting, adopt, child, find, from_pidfd, is_running, spawn};
pub use cpu_time::cpu_time;
pub use written::{Written, written};
