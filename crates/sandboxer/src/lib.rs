//! One resident daemon per node that runs every pod in a microVM of its own.

pub mod api;
pub mod checkpoint;
mod containerd;
pub mod daemon;
pub mod error;
pub mod events;
pub mod front;
#[cfg(fuzzing)]
pub mod fuzzing;
mod heap;
pub mod journald;
pub mod pod;
pub mod privileges;
pub mod share;
pub mod state;
mod taps;
pub mod template;
pub mod traces;
