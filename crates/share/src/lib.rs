//! Live host directories in a pod's guest.
//!
//! ```text
//!  container ─▶ guest's kernel ─▶ agent's carrier ─▶ VMM ─▶ sandboxer-share, one per pod ─▶ the directories
//!                 (FUSE)          (a disk, vsock)   (a socket)  └ a mount namespace with nothing else in it
//! ```
//!
//! `main.rs` is the program. This library is the daemon's part, and the messages that the program parses.

pub mod attach;
#[cfg(feature = "serve")]
pub mod wire;

/// The directory of the shares, each under its name.
pub const ROOT: &str = "/shares";
