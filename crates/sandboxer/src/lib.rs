//! One resident daemon per node that runs every pod in a microVM of its own.
//!
//! A pod's start passes through the modules in this order, and none calls back up:
//! [`api`] → [`pod`] → [`host`] → [`vmm`] → [`guest`] → [`container`].

pub mod api;
pub mod container;
pub mod daemon;
pub mod doctor;
pub mod error;
pub mod events;
pub mod front;
#[cfg(fuzzing)]
pub mod fuzzing;
pub mod guest;
mod heap;
pub mod host;
pub mod pod;
pub mod pool;
pub mod privileges;
pub mod template;
