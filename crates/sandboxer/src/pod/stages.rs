//! The steps of one start. Each is a tracing span and is stored with the pod; if the request is traced, it is also a
//! span of that trace.

use std::{
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use sandboxer_base::failpoint::pass;
use sandboxer_protocol::{id::SandboxId, stage::Stage};
use tracing::Instrument;

use super::stage_times::StageTimes;
use crate::traces::{Ended, SpanContext};

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The step succeeded.
    Ok,
    /// The step failed.
    Failed,
    /// The step was cancelled.
    Cancelled,
}

impl Outcome {
    /// Returns the outcome's name, for messages and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Failed => "failed",
            Outcome::Cancelled => "cancelled",
        }
    }
}

/// One completed step.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// The stage of the step.
    pub stage: Stage,
    /// Offset from the beginning of the start, ns.
    pub begin_ns: u64,
    /// Duration, ns.
    pub duration_ns: u64,
    /// The outcome of the step.
    pub outcome: Outcome,
}

/// The steps of one start, of a pod or of a container.
#[derive(Debug, Clone)]
pub struct Stages {
    pod: SandboxId,
    began: Instant,
    // A plain lock: held for a push or a copy, never across an await.
    steps: Arc<Mutex<Vec<Step>>>,
    times: Arc<StageTimes>,
    /// The request that the steps are part of.
    request: SpanContext,
}

impl Stages {
    /// Starts the clock. Each step is also added to `times`, the histograms of all starts.
    pub fn new(pod: SandboxId, times: Arc<StageTimes>) -> Self {
        Self { pod, began: Instant::now(), steps: Arc::default(), times, request: SpanContext::default() }
    }

    /// Returns the same steps; later steps are part of this request.
    pub fn within(self, request: SpanContext) -> Self {
        Self { request, ..self }
    }

    /// Runs one step, in a span with the stage's name.
    pub async fn run<T, E>(&self, stage: Stage, step: impl Future<Output = Result<T, E>>) -> Result<T, E> {
        let span = tracing::info_span!("stage", stage = stage.as_str(), pod = %self.pod);
        let context = self.request.child();
        let (began, outcome) = (Instant::now(), Outcome::Cancelled);
        let mut record = Record { stages: self, stage, began, outcome, context: context.clone() };
        pass(format_args!("before stage {stage}"));
        let result = context.scope(step.instrument(span)).await;
        pass(format_args!("after stage {stage}"));
        record.outcome = if result.is_ok() { Outcome::Ok } else { Outcome::Failed };
        result
    }

    /// Returns the steps so far.
    pub fn steps(&self) -> Vec<Step> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Records a step when it ends, whatever its outcome.
struct Record<'a> {
    stages: &'a Stages,
    stage: Stage,
    began: Instant,
    outcome: Outcome,
    context: SpanContext,
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        let nanos = |duration: std::time::Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let step = Step {
            stage: self.stage,
            begin_ns: nanos(self.began - self.stages.began),
            duration_ns: nanos(self.began.elapsed()),
            outcome: self.outcome,
        };
        tracing::debug!(
            pod = %self.stages.pod,
            stage = step.stage.as_str(),
            duration_us = step.duration_ns / 1000,
            outcome = step.outcome.as_str(),
            "stage ended"
        );
        let failure = match step.outcome {
            Outcome::Ok => "",
            Outcome::Failed | Outcome::Cancelled => step.outcome.as_str(),
        };
        let took = std::time::Duration::from_nanos(step.duration_ns);
        let ended = Ended { name: step.stage.as_str(), began: self.began, took, failure };
        self.context.end(&self.stages.request, &ended);
        self.stages.times.record(step.stage, step.outcome, step.duration_ns);
        self.stages.steps.lock().unwrap_or_else(PoisonError::into_inner).push(step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_way_a_step_can_end_is_kept() {
        let stages = Stages::new("p".parse().unwrap(), Arc::default());
        stages.run(Stage::Netns, async { Ok::<_, ()>(()) }).await.unwrap();
        stages.run(Stage::VmmSpawn, async { Err::<(), _>(()) }).await.unwrap_err();
        drop(
            tokio::time::timeout(
                std::time::Duration::from_millis(1),
                stages.run(Stage::Boot, std::future::pending::<Result<(), ()>>()),
            )
            .await,
        );
        let recorded: Vec<_> = stages.steps().iter().map(|s| (s.stage, s.outcome)).collect();
        assert_eq!(
            recorded,
            [
                (Stage::Netns, Outcome::Ok),
                (Stage::VmmSpawn, Outcome::Failed),
                (Stage::Boot, Outcome::Cancelled)
            ]
        );
    }
}
