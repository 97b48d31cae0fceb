//! Workloads: benchmark tools in a container of any runtime, and their figures.
//!
//! | module | what it holds |
//! |---|---|
//! | [`definition`] | the probes, as data: tool, study, metrics, parameters |
//! | [`plan`] | the plan and its commands |
//! | [`facts`] | resources of a container, read from inside; comparability of two runtimes |
//! | [`container`], [`log`] | a container from its start to its end; its output |
//! | [`output`] | parsers of the tools' output |
//! | [`native`], [`group`] | a tool as a process of the host, and its limits |
//! | [`volume`], [`block`] | storage of a tool's files |
//! | [`host`], [`cpu`], [`power`] | the host during a run; CPU time by role; power |
//! | [`run`], [`runner`] | one run; many runs in a fair order |
//! | [`summary`], [`efficiency`] | summaries, and confidence of differences; work per CPU time and per W |
//! | [`report`], [`store`] | the result and its files |
//! | [`figures`], [`compare`], [`join`] | its plots; two results side by side; parts of one measurement |

pub mod block;
pub mod compare;
pub mod container;
pub mod cpu;
pub mod definition;
pub mod efficiency;
pub mod facts;
pub mod figures;
pub mod group;
pub mod host;
pub mod join;
pub mod log;
pub mod measure;
pub mod native;
pub mod output;
pub mod plan;
pub mod power;
pub mod report;
pub mod run;
pub mod runner;
pub mod store;
pub mod summary;
pub mod volume;
