//! How fast pods start and what they cost: measured over CRI, for any runtime handler.
//!
//! | module | what it holds |
//! |---|---|
//! | [`runtime`], [`options`] | a CRI client, and what pods and containers are to be |
//! | [`timeline`], [`first_byte`] | one start, stamped; the whole measuring path |
//! | [`startup`], [`sample`] | many starts in a fair order; the raw rows |
//! | [`summary`], [`ratio`] | percentiles and distributions; how sure a difference is |
//! | [`trace`], [`exits`] | the daemon's own account of a start, and KVM's |
//! | [`clock`] | by which clock |
//! | [`overhead`] | what the observer costs |
//! | [`memory`], [`ledger`], [`attribution`], [`pss`] | what pods cost, by role, over their number |
//! | [`report`], [`store`], [`html`], [`markdown`], [`compare`], [`merge`] | a result: its shape, its files, what is made of it |
//! | [`workload`] | tools of the field's studies in a container of any runtime |
//! | [`gate`] | what was recorded of earlier versions, and whether this one is slower |

pub mod anchors;
pub mod attribution;
pub mod bare_boot;
pub mod clock;
pub mod compare;
pub mod exits;
pub mod figures;
pub mod first_byte;
pub mod gate;
pub mod html;
pub mod ledger;
pub mod manifest;
pub mod markdown;
pub mod measure;
pub mod memory;
pub mod merge;
pub mod options;
pub mod overhead;
pub mod plot;
pub mod process;
pub mod pss;
pub mod ratio;
pub mod report;
pub mod runtime;
pub mod runtime_class;
pub mod sample;
pub mod startup;
pub mod store;
pub mod summarise;
pub mod summary;
pub mod timeline;
pub mod trace;
pub mod warnings;
pub mod workload;
