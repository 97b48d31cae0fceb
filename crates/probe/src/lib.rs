//! Measures start-up time and memory of pods over CRI, for any runtime handler.
//!
//! | module | what it holds |
//! |---|---|
//! | [`runtime`], [`options`] | a CRI client, and options of pods and containers |
//! | [`timeline`], [`first_byte`] | one start with timestamps; the whole measuring path |
//! | [`startup`], [`sample`] | many starts in a fair order; the raw rows |
//! | [`summary`], [`ratio`], [`rate`] | percentiles and distributions; confidence of differences; sustained rates |
//! | [`trace`], [`exits`] | stages from the daemon, exits from KVM |
//! | [`clock`], [`sides`] | the clock of times; properties of the compared sides |
//! | [`overhead`] | cost of the probe itself |
//! | [`memory`], [`ledger`], [`attribution`], [`pss`], [`idle`] | memory by role and pod count; CPU time of idle pods |
//! | [`report`], [`store`], [`compare`], [`results`] | a result: format and files; two results side by side |
//! | [`present`], [`document`] | what is shown of results; its three renderers |
//! | [`workload`] | the result of benchmark tools in a container of any runtime |
//! | [`log`], [`group`] | a container's output; the control group of a process of the host |
//! | [`vm`], [`native`] | a conventional VM and a process of the host, for comparison |

pub mod anchors;
pub mod attribution;
pub mod bare_boot;
pub mod busy;
pub mod clock;
pub mod compare;
pub mod document;
pub mod exits;
pub mod figures;
pub mod first_byte;
pub mod group;
pub mod idle;
pub mod kubernetes;
pub mod ledger;
pub mod log;
pub mod manifest;
pub mod measure;
pub mod memory;
pub mod native;
pub mod options;
pub mod overhead;
pub mod plot;
pub mod present;
pub mod process;
pub mod pss;
pub mod rate;
pub mod ratio;
pub mod report;
pub mod results;
pub mod runtime;
pub mod runtime_class;
pub mod sample;
pub mod sides;
pub mod startup;
pub mod store;
pub mod summarise;
pub mod summary;
pub mod timeline;
pub mod trace;
pub mod vm;
pub mod warnings;
pub mod workload;

#[cfg(test)]
extern crate self as sandboxer_probe;
