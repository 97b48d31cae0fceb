//! The laboratory beside the product: workloads, streams, and verdicts on results. `sandboxer-bench` is its program.
//!
//! | module | what it holds |
//! |---|---|
//! | [`workload`] | benchmark tools in a container of any runtime |
//! | [`streams`] | commands in containers, and logs of containers |
//! | [`checkpoints`] | saves of pods, and starts from there |
//! | [`merge`] | several runs as one result |
//! | [`score`] | verdicts on results, by rules that are data |
//! | [`gate`] | comparison with recorded results of earlier versions |

pub mod checkpoints;
pub mod gate;
pub mod merge;
pub mod score;
pub mod streams;
pub mod workload;

#[cfg(test)]
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../probe/tests/double/made_up.rs"]
mod made_up;
