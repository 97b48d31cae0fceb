//! The front: a small resident process. containerd stays connected to it, while the worker behind it, which
//! does all the work, may die at any time and is restarted.
//!
//! ```text
//!  containerd ──task connections──▶ front ──one link per connection──▶ worker
//!                                     └──control socket, one──────────────┘
//! ```
//!
//! The front knows nothing about pods. It splits the streams into [`frame`]s, remembers each request until
//! its response was forwarded, and keeps what the worker gives it ([`control`]): listeners, FIFOs, notes. The
//! next worker receives all of it, and then the requests without a response, marked as repeated.
//!
//! The front may be killed, too: its state is in a [`journal`] and its streams are in files in memory, and the [`holder`], a process with
//! the same descriptors, makes the next front. A reload replaces both by the build that is installed then, in the holder's process.
//!
//! A worker that does not respond is replaced like one that died. A request that three workers have died with
//! gets an error.
//!
//! One thread, no locks; timers for the back-off of a worker that keeps dying, and for pings.

pub mod control;
pub mod frame;

mod connection;
mod front;
mod holder;
mod journal;
mod log;
mod memory_file;
mod outbox;
mod stream;
mod worker;

pub use front::{FrontError, MAX_SILENCE, check, resume, run};
pub use holder::Build;
