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
//! A worker that does not answer is replaced as one that died is. A request that three workers ended under is answered
//! with an error instead of being given to a fourth.
//!
//! One thread, no locks; timers for the back-off of a worker that keeps dying, and to ask one whether it is there.

pub mod control;
pub mod frame;

mod connection;
mod front;
mod outbox;
mod say;
mod worker;

pub use front::{FrontError, MAX_SILENCE, run};
