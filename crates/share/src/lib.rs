//! Host directories that a pod has in its guest as they are, live.
//!
//! ```text
//!  container ─▶ guest's kernel ─▶ agent's carrier ─▶ VMM ─▶ sandboxer-share, one per pod ─▶ the directories
//!                 (FUSE)          (a disk, vsock)   (a socket)  └ a mount namespace with nothing else in it
//! ```
//!
//! The program is in `main.rs`; here is what the daemon does to it from outside.

pub mod attach;

/// Where the program has its shares, each under its name.
pub const ROOT: &str = "/shares";
