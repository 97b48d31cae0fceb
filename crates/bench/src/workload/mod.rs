//! Measures workloads: benchmark tools in a container of any runtime.
//!
//! | module | what it holds |
//! |---|---|
//! | [`plan`] | the plan and its commands |
//! | [`container`] | a container from its start to its end |
//! | [`output`] | parsers of the tools' output |
//! | [`native`] | a tool as a process of the host |
//! | [`volume`], [`block`] | storage of a tool's files |
//! | [`host`], [`cpu`], [`power`] | reads the host during a run; CPU time by role; power |
//! | [`runner`], [`measure`] | many runs in a fair order; a whole measurement |
//! | [`join`] | parts of one measurement |

pub mod block;
pub mod container;
pub mod cpu;
pub mod host;
pub mod join;
pub mod measure;
pub mod native;
pub mod output;
pub mod plan;
pub mod power;
pub mod runner;
pub mod volume;
