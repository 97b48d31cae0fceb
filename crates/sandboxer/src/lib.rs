//! One resident daemon per node that runs every pod in a microVM of its own.
//!
//! A pod start passes through the modules in this order, and none calls back up:
//! `api` → `pod` → `host` → `vmm` → `guest` → `container`.

pub mod config;
pub mod vmm;
