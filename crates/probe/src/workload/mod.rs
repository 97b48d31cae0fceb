//! Workloads: tools of the field's studies in a container of any runtime, and what they say.
//!
//! | module | what it holds |
//! |---|---|
//! | [`definition`] | the probes, as data: tool, study, metrics, parameters |
//! | [`plan`] | what was asked for; which commands that makes |
//! | [`facts`] | what a container has, read from inside; when two runtimes may be compared |
//! | [`container`], [`log`] | a container from its start to its end; what it printed |
//! | [`output`] | figures out of what each tool prints |
//! | [`volume`] | where a tool's files lie |
//! | [`host`] | what the host's processors did meanwhile |
//! | [`run`], [`runner`] | one run; many runs in a fair order |
//! | [`summary`] | what runs come to, and how sure a difference is |
//! | [`report`], [`store`] | the result and its files |

pub mod container;
pub mod definition;
pub mod facts;
pub mod host;
pub mod log;
pub mod measure;
pub mod output;
pub mod plan;
pub mod report;
pub mod run;
pub mod runner;
pub mod store;
pub mod summary;
pub mod volume;
