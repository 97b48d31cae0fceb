//! The front: a small resident process. containerd stays connected to it, while the worker behind it, which does all
//! the work, may die at any time and is restarted.
//!
//! ```text
//!  containerd ──task connections──▶ front ──one link per connection──▶ worker
//!                                     └──control socket, one──────────────┘
//! ```
//!
//! The front knows nothing about pods. It splits the streams into [`frame`]s, remembers each request until its response
//! was forwarded, and keeps the worker's listeners, FIFOs and notes ([`control`]). The next worker receives all of
//! these, and then the requests without a response, marked as repeated.
//!
//! The front may be killed, too: its state is in a [`journal`], and its streams are in files in memory. The service
//! manager keeps all of its descriptors ([`store`]) and hands them to the next front. It is systemd or, on a host
//! without systemd, the [`keeper`]. A reload executes the installed build in the front's process.
//!
//! A worker that does not respond is replaced like one that died. A request with which three workers have died gets an
//! error.
//!
//! The front has one thread and no locks. It has timers for the back-off of a worker that keeps dying, and for pings.

pub mod control;
pub mod frame;

mod connection;
mod front;
mod journal;
mod keeper;
mod log;
mod memory_file;
mod outbox;
mod store;
mod stream;
mod worker;

pub use front::{Build, FrontError, MAX_SILENCE, Unfit, check, resume, run};
pub use keeper::KEEPER;
