//! The result of workloads: benchmark tools in a container of any runtime. `sandboxer-bench` measures them.
//!
//! | module | what it holds |
//! |---|---|
//! | [`definition`] | the probes, as data: tool, study, metrics, parameters |
//! | [`facts`] | resources of a container, read from inside; comparability of two runtimes |
//! | [`run`], [`host`], [`cpu`] | one run; the host during a run; CPU time by role |
//! | [`summary`], [`efficiency`] | summaries, and confidence of differences; work per CPU time and per W |
//! | [`report`], [`store`] | the result and its files |
//! | [`figures`], [`compare`] | its plots; two results side by side |
//! | [`published`] | figures of a study with the same parameters |

pub mod compare;
pub mod cpu;
pub mod definition;
pub mod efficiency;
pub mod facts;
pub mod figures;
pub mod host;
pub mod published;
pub mod report;
pub mod run;
pub mod store;
pub mod summary;

#[cfg(test)]
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../tests/double/made_up.rs"]
pub mod made_up;
