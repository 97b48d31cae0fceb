//! The front: a tiny resident process that containerd stays connected to while the worker behind it,
//! which does all the work, may die at any instant and is started again.
//!
//! ```text
//!  containerd ──task connections──▶ front ──one link per connection──▶ worker
//!                                     └──control socket, one──────────────┘
//! ```
//!
//! It knows nothing of pods: it cuts what passes into [`frame`]s, remembers each request until its answer
//! has passed, and keeps what the worker hands it ([`control`]): listeners, FIFOs, notes. The next worker
//! gets all of it back, then the requests that have no answer yet, marked as repeated.
//!
//! One thread, no locks, no timers but the back-off of a worker that keeps dying.

pub mod control;
pub mod frame;

mod connection;
mod front;
mod outbox;
mod worker;

pub use front::{FrontError, run};
