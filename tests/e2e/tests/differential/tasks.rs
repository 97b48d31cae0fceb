//! Sequences of requests on both sides, step by step.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::join;
use rand::SeedableRng;
use rand::rngs::StdRng;
use sandboxer_e2e::case::Case;
use sandboxer_e2e::containerd::Containerd;

use crate::events::{Events, Heard};
use crate::known::{Difference, explains};
use crate::side::{PATIENCE, Side, State, restart_containerd};
use crate::steps::{Fixed, Step, corpus, random, shrink};

/// Sequences in one pod.
const PER_POD: usize = 20;

/// Attempts to make a sequence shorter.
const ATTEMPTS: usize = 30;

/// What does not change for this long has come to its end.
const STEADY: Duration = Duration::from_millis(200);

/// A pod on each side.
struct Pair {
    runc: Side,
    ours: Side,
}

/// What a run has come to.
#[derive(Default)]
struct Counts {
    sequences: usize,
    steps: usize,
    pods: usize,
    unsteady: usize,
    /// By what was compared and what was answered.
    known: BTreeMap<String, usize>,
}

/// A run of sequences.
pub struct Run {
    runc: Case,
    ours: Case,
    containerd: Containerd,
    events: Events,
    pair: Option<Pair>,
    in_pod: usize,
    counts: Counts,
    found: Vec<Difference>,
}

impl Run {
    /// Connects to the stack of two cases.
    pub async fn new(runc: Case, ours: Case, containerd: Containerd) -> Result<Self> {
        let events = Events::hear(containerd.clone()).await?;
        let (pair, counts, found) = (None, Counts::default(), Vec::new());
        Ok(Self { runc, ours, containerd, events, pair, in_pod: 0, counts, found })
    }

    /// Runs the sequences that once showed a difference, and random ones until `end`; one alone if it is asked for.
    pub async fn until(&mut self, end: Instant, seed: u64, only: Option<u64>) -> Result<()> {
        let began = Instant::now();
        let known = corpus();
        let mut last_report = Instant::now();
        for number in only.unwrap_or(0).. {
            let fixed = usize::try_from(number).ok().and_then(|number| known.get(number));
            let steps = match fixed {
                Some(fixed) => fixed.steps.clone(),
                None => random(&mut StdRng::seed_from_u64(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15))),
            };
            let difference = self.sequence(&steps, only.is_some()).await?;
            match difference {
                None => {}
                // It is short as it is.
                Some(difference) => match fixed {
                    Some(Fixed { name, steps }) => {
                        println!("sequence {number}, {name}: {difference:?}, by\n{}", listed(steps));
                        self.found.push(difference);
                    }
                    None if only.is_some() => self.found.push(difference),
                    None => self.look_closer(seed, number, steps, difference).await?,
                },
            }
            if last_report.elapsed() > Duration::from_secs(20) || only.is_some() {
                last_report = Instant::now();
                println!("{:4.0} s: {}", began.elapsed().as_secs_f64(), self.summary());
            }
            if Instant::now() >= end || only.is_some() {
                break;
            }
        }
        if let Some(pair) = self.pair.take() {
            remove(pair).await?;
        }
        println!("seed {seed}, {:.0} s: {}", began.elapsed().as_secs_f64(), self.summary());
        for (known, times) in &self.counts.known {
            println!("  {times} times, known: {known}");
        }
        ensure!(
            self.found.is_empty(),
            "{} differences that have no reason; the first: {:?}",
            self.found.len(),
            self.found.first()
        );
        Ok(())
    }

    fn summary(&self) -> String {
        let counts = &self.counts;
        format!(
            "{} sequences, {} steps, {} pods; {} differences, {} that did not show again, {} with a known reason",
            counts.sequences,
            counts.steps,
            counts.pods,
            self.found.len(),
            counts.unsteady,
            counts.known.values().sum::<usize>()
        )
    }

    /// Shows a difference by the shortest sequence that has it.
    async fn look_closer(
        &mut self,
        seed: u64,
        number: u64,
        steps: Vec<Step>,
        difference: Difference,
    ) -> Result<()> {
        if self.found.iter().any(|found| found.is_like(&difference)) {
            println!("again, in sequence {number}: {difference:?}");
            return Ok(());
        }
        println!("sequence {number} of seed {seed}: {difference:?}");
        if self.sequence(&steps, false).await?.is_none_or(|again| !again.is_like(&difference)) {
            self.counts.unsteady += 1;
            println!("  it does not show again by\n{}", listed(&steps));
            return Ok(());
        }
        let run = tokio::sync::Mutex::new(&mut *self);
        let (run, difference) = (&run, &difference);
        let shortest = shrink(steps, ATTEMPTS, |steps| async move {
            let again = run.lock().await.sequence(&steps, false).await;
            again.is_ok_and(|again| again.is_some_and(|again| again.is_like(difference)))
        })
        .await;
        println!("  the shortest sequence, as sequence {number} of seed {seed} has it:");
        self.sequence(&shortest, true).await?;
        self.found.push(difference.clone());
        Ok(())
    }

    /// Runs one sequence. After a difference the pods are others.
    async fn sequence(&mut self, steps: &[Step], shown: bool) -> Result<Option<Difference>> {
        if self.in_pod >= PER_POD
            && let Some(pair) = self.pair.take()
        {
            remove(pair).await?;
        }
        let mut pair = match self.pair.take() {
            Some(pair) => pair,
            None => {
                self.in_pod = 0;
                self.counts.pods += 1;
                let start = |case: &Case| Side::start(case.clone(), self.containerd.clone());
                let (runc, ours) = join(start(&self.runc), start(&self.ours)).await;
                Pair { runc: runc?, ours: ours? }
            }
        };
        self.in_pod += 1;
        self.counts.sequences += 1;
        let outcome = self.compared(&mut pair, steps, shown).await;
        let difference = outcome.unwrap_or_else(|error| {
            let (what, runc) = ("a sequence that can be run".to_owned(), String::new());
            Some(Difference { what, runc, ours: format!("{error:#}") })
        });
        match &difference {
            None => self.pair = Some(pair),
            Some(difference) => {
                if shown {
                    println!("    {difference:?}");
                }
                if let Err(error) = remove(pair).await {
                    println!("  after a difference: {error:#}");
                }
            }
        }
        Ok(difference)
    }

    /// Notes a difference that has a reason; returns one that has none, or whether the sequence ends.
    fn judged(&mut self, what: &str, runc: &str, ours: &str) -> std::result::Result<bool, Difference> {
        if runc == ours {
            return Ok(false);
        }
        self.explained(Difference { what: what.to_owned(), runc: runc.to_owned(), ours: ours.to_owned() })
    }

    /// As [`Self::judged`], of each process.
    fn judged_state(
        &mut self,
        step: &str,
        runc: &State,
        ours: &State,
    ) -> std::result::Result<bool, Difference> {
        let mut ends = false;
        for difference in runc.unlike(ours, step) {
            ends |= self.explained(difference)?;
        }
        Ok(ends)
    }

    fn explained(&mut self, difference: Difference) -> std::result::Result<bool, Difference> {
        let Some(known) = explains(&difference) else { return Err(difference) };
        let Difference { what, runc, ours } = difference;
        let text = format!("{what}: runc {runc}, sandboxer {ours}: {}", known.why);
        *self.counts.known.entry(text).or_default() += 1;
        Ok(known.ends)
    }

    async fn compared(&mut self, pair: &mut Pair, steps: &[Step], shown: bool) -> Result<Option<Difference>> {
        let (mut all_heard, mut ways_part) = (true, false);
        for &step in steps {
            self.counts.steps += 1;
            if let Step::RestartContainerd { killed } = step {
                // What happens while there is none has no subscribers.
                all_heard = false;
                restart_containerd(&self.runc, &self.containerd, killed).await?;
            }
            let will_end =
                step.target().filter(|_| pair.runc.will_end(step)).map(|target| target.to_string());
            let wanted = pair.runc.perform(step).await.context("runc")?;
            let state = steady(&pair.runc, will_end.as_deref()).await;
            let answer = pair.ours.perform(step).await.context("sandboxer")?;
            if shown {
                println!("    {step:?}\n      runc      {wanted:6} {state}");
            }
            let name = step.name();
            let answered = self.judged(&format!("answer of {name}"), &wanted, &answer);
            let ours = match &answered {
                Ok(false) => becomes(&pair.ours, &state, &name).await,
                _ => pair.ours.state().await,
            };
            if shown {
                println!("      sandboxer {answer:6} {ours}");
            }
            match answered {
                Ok(false) => {}
                Ok(true) => {
                    ways_part = true;
                    break;
                }
                Err(difference) => return Ok(Some(difference)),
            }
            match self.judged_state(&name, &state, &ours) {
                Ok(false) => {}
                Ok(true) => {
                    ways_part = true;
                    break;
                }
                Err(difference) => return Ok(Some(difference)),
            }
        }
        let began = Instant::now();
        while !ways_part && pair.runc.output() != pair.ours.output() && began.elapsed() < PATIENCE / 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if !ways_part && let Err(difference) = self.judged("output", &pair.runc.output(), &pair.ours.output())
        {
            return Ok(Some(difference));
        }
        let ids = (pair.runc.ids(), pair.ours.ids());
        let (runc, ours) = (pair.runc.finish().await?, pair.ours.finish().await?);
        if let Err(difference) = self.judged("end", &runc.join("; "), &ours.join("; ")) {
            return Ok(Some(difference));
        }
        if all_heard && !ways_part {
            let (runc, ours) = self.heard(&ids.0, &ids.1).await;
            if let Err(difference) = self.judged("events", &runc, &ours) {
                return Ok(Some(difference));
            }
        }
        let (runc, ours) = (pair.runc.forget().await?, pair.ours.forget().await?);
        if let Err(difference) = self.judged("what is left", &runc.join("; "), &ours.join("; ")) {
            return Ok(Some(difference));
        }
        Ok(None)
    }

    /// Returns the events of both sides, once they are complete.
    async fn heard(&self, runc: &[String], ours: &[String]) -> (String, String) {
        let events_of = |ids: &[String], is_runc| {
            let heard = ids.iter().map(|id| self.events.of_container(id));
            heard.map(|heard| published(heard, is_runc)).collect::<Vec<_>>().join("; ")
        };
        let complete = |ids: &[String]| {
            ids.iter().all(|id| {
                let heard = self.events.of_container(id);
                let init = heard.get("").map(Vec::as_slice).unwrap_or_default();
                init.is_empty() || init.iter().any(|event| event.starts_with("TaskDelete"))
            })
        };
        let began = Instant::now();
        while !complete(runc) && began.elapsed() < Duration::from_secs(5) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        while events_of(runc, true) != events_of(ours, false) && began.elapsed() < PATIENCE / 2 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        (events_of(runc, true), events_of(ours, false))
    }
}

/// Returns events as they are compared. runc's shim has two queues: the end of a task may come after its deletion. How far a creation
/// had come when its caller gave it up is chance, so a container's events begin with its last creation.
fn published(heard: Heard, is_runc: bool) -> String {
    let mut parts = Vec::new();
    for (process, mut events) in heard {
        let begin = events.iter().rposition(|event| event == "TaskCreate").unwrap_or_default();
        events.drain(..begin);
        if is_runc {
            events.sort_by_key(|event| event.starts_with("TaskDelete"));
        }
        let events = events.join(", ");
        if !events.is_empty() {
            parts.push(format!("[{process}] {events}"));
        }
    }
    parts.join(" ")
}

/// Returns the state of a side that has come to rest; `ending` is the process that is about to end.
async fn steady(side: &Side, ending: Option<&str>) -> State {
    let began = Instant::now();
    let mut last = side.state().await;
    let mut since = Instant::now();
    loop {
        let enough = since.elapsed() >= STEADY && ending.is_none_or(|name| last.has_ended(name));
        if enough || began.elapsed() > PATIENCE / 5 {
            return last;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        let now = side.state().await;
        if now != last {
            last = now;
            since = Instant::now();
        }
    }
}

/// Returns the state of a side once it is the wanted one, or differs for good.
async fn becomes(side: &Side, wanted: &State, step: &str) -> State {
    let began = Instant::now();
    loop {
        let state = side.state().await;
        let unlike = wanted.unlike(&state, step);
        if unlike.iter().all(|difference| explains(difference).is_some()) || began.elapsed() > PATIENCE {
            return state;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn remove(pair: Pair) -> Result<()> {
    let (runc, ours) = join(pair.runc.remove(), pair.ours.remove()).await;
    runc.context("runc")?;
    ours.context("sandboxer")
}

/// Lists steps, one a line.
fn listed(steps: &[Step]) -> String {
    steps.iter().map(|step| format!("    {step:?}")).collect::<Vec<_>>().join("\n")
}
