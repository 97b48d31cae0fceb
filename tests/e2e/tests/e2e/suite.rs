//! What all cases share, and how one is run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use libtest_mimic::Failed;
use sandboxer_e2e::case::Case;
use sandboxer_e2e::cri::Cri;
use sandboxer_e2e::stack::Stack;
use tokio::runtime::Runtime;

use crate::versions::{self, Containerd};
use crate::{Entry, On, case_name};

/// A case is given up after this long, unless SANDBOXER_E2E_LIMIT says otherwise, in seconds.
const LIMIT: Duration = Duration::from_secs(180);
/// One that has the stack to itself may be a long story of faults.
const LIMIT_ALONE: Duration = Duration::from_secs(900);

fn limit(on: On) -> Duration {
    let configured = std::env::var("SANDBOXER_E2E_LIMIT").ok().and_then(|seconds| seconds.parse().ok());
    configured.map_or(if on.is_alone() { LIMIT_ALONE } else { LIMIT }, Duration::from_secs)
}

/// One stack, in which cases run.
pub struct Suite {
    runtime: Runtime,
    stack: Arc<Stack>,
    cri: Cri,
    containerd: Containerd,
    /// Cases that mean nothing beside that containerd.
    not_applicable: Mutex<BTreeMap<&'static str, &'static str>>,
    // Held for reading by a case, for writing by one that must be alone. Held across a whole case, by threads
    // of libtest-mimic that do nothing else.
    alone: RwLock<()>,
    outcomes: Mutex<Outcomes>,
}

/// Of each case, why it failed if it did, by handler.
type Outcomes = BTreeMap<&'static str, BTreeMap<&'static str, Result<(), String>>>;

impl Suite {
    /// Starts the stack.
    pub fn up(daemon: bool) -> Result<Self> {
        let started = Instant::now();
        let stack = Stack::up(daemon).context("cannot start the stack")?;
        let runtime = Runtime::new()?;
        let cri = runtime.block_on(async { Cri::connect(stack.containerd_socket()?) })?;
        let containerd = Containerd::query(&stack)?;
        println!(
            "stack of this run: {}, containerd {}, up in {:.1} s",
            stack.dir().display(),
            containerd.version,
            started.elapsed().as_secs_f64()
        );
        Ok(Self {
            runtime,
            stack: Arc::new(stack),
            cri,
            containerd,
            not_applicable: Mutex::default(),
            alone: RwLock::new(()),
            outcomes: Mutex::default(),
        })
    }

    /// Returns whether a case means nothing beside this containerd, and says so at the end.
    pub fn is_not_applicable(&self, entry: &Entry) -> bool {
        let case = case_name(entry);
        let lacks = self.containerd.lacks(case);
        if let Some(why) = lacks {
            let mut all = self.not_applicable.lock().unwrap_or_else(PoisonError::into_inner);
            all.insert(case, why);
        }
        lacks.is_some()
    }

    /// Writes the run's line into the document that SANDBOXER_E2E_VERSIONS names.
    pub fn write_versions(&self) -> Result<()> {
        let Some(document) = std::env::var_os("SANDBOXER_E2E_VERSIONS") else { return Ok(()) };
        let outcomes = self.outcomes();
        let cases = |passed: bool| {
            let ours = outcomes.iter().filter_map(|(case, by)| Some((*case, by.get("sandboxer")?)));
            ours.filter(|(_, outcome)| outcome.is_ok() == passed).map(|(case, _)| case).collect::<Vec<_>>()
        };
        let not_applicable = self.not_applicable.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = versions::Outcome {
            containerd: &self.containerd,
            passed: cases(true).len(),
            failed: cases(false),
            not_applicable: not_applicable.keys().copied().collect(),
        };
        versions::put_into(document.as_ref(), &outcome)
    }

    /// Runs a case, and notes what it came to.
    pub fn run(&self, entry: &Entry, handler: &'static str, name: &str) -> Result<(), Failed> {
        let (_alone, _together);
        let outcome = if entry.on.is_alone() {
            _alone = self.alone.write().unwrap_or_else(PoisonError::into_inner);
            self.run_alone(entry, handler, name)
        } else {
            _together = self.alone.read().unwrap_or_else(PoisonError::into_inner);
            self.run_case(entry, handler, name)
        };
        let outcome = outcome.map_err(|error| format!("{error:#}"));
        self.outcomes().entry(case_name(entry)).or_default().insert(handler, outcome.clone());
        Ok(outcome?)
    }

    /// Leftovers from before the case are not its fault; those after it are. Neither disturbs the next case.
    fn run_alone(&self, entry: &Entry, handler: &'static str, name: &str) -> Result<()> {
        let earlier = self.left().context("before the case")?;
        if !earlier.is_empty() {
            let note = format!("left before {name}: {}", earlier.join(", "));
            self.outcomes().entry("(between the cases)").or_default().insert(handler, Err(note));
            self.renew()?;
        }
        let outcome = self.run_case(entry, handler, name).and_then(|()| {
            let left = self.left()?;
            if left.is_empty() { Ok(()) } else { Err(anyhow!("left: {}", left.join(", "))) }
        });
        if let Err(error) = &outcome {
            eprintln!("{name}: {error:#}\n{}", self.stack.log_tails(15));
            if let Err(error) = self.renew() {
                eprintln!("{error:#}");
            }
        }
        outcome
    }

    fn run_case(&self, entry: &Entry, handler: &'static str, name: &str) -> Result<()> {
        let case = Case {
            stack: Arc::clone(&self.stack),
            cri: self.cri.clone(),
            handler,
            name: name.replace("::", "-").replace('_', "-"),
        };
        self.runtime.block_on(async {
            let run = tokio::spawn((entry.run)(case.clone()));
            let outcome = match tokio::time::timeout(limit(entry.on), run).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(panic)) => Err(panic.into()),
                Err(_) => Err(anyhow!("not over after {:?}", limit(entry.on))),
            };
            let cleaned = match tokio::time::timeout(LIMIT, case.clean_up()).await {
                Ok(cleaned) => cleaned.context("cannot clean up"),
                Err(_) => Err(anyhow!("clean-up not over after {LIMIT:?}")),
            };
            match (outcome, cleaned) {
                (outcome, Ok(())) => outcome,
                (Ok(()), error) => error,
                (Err(error), Err(other)) => Err(anyhow!("{error:#}\nand {other:#}")),
            }
        })
    }

    /// Returns what the stack holds of pods, though every one is removed.
    fn left(&self) -> Result<Vec<String>> {
        self.runtime.block_on(self.stack.left())
    }

    /// Another stack in the place of one that a case has spoilt.
    fn renew(&self) -> Result<()> {
        self.stack.renew().context("cannot start the stack anew")
    }

    fn outcomes(&self) -> MutexGuard<'_, Outcomes> {
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One table: case, ours, runc.
    pub fn print_outcomes(&self) {
        let outcomes = self.outcomes();
        let width = outcomes.keys().map(|case| case.len()).max().unwrap_or_default();
        println!("\n{:width$}  sandboxer  runc", "case");
        for (case, by) in outcomes.iter() {
            let outcome = |handler| match by.get(handler) {
                None => "-",
                Some(Ok(())) => "ok",
                Some(Err(_)) => "FAILED",
            };
            println!("{case:width$}  {:9}  {}", outcome("sandboxer"), outcome("runc"));
        }
        for (case, why) in self.not_applicable.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            println!("{case:width$}  not beside containerd {}: {why}", self.containerd.version);
        }
    }

    /// Takes the stack down. Whether nothing was left: by the pods in the stack, and by the stack on the host.
    pub fn down(self) -> Result<bool> {
        let mut failed = Vec::new();
        for (case, by) in self.outcomes().iter() {
            for (handler, outcome) in by {
                if let Err(reason) = outcome {
                    failed.push(format!("{handler}::{case}: {reason}"));
                }
            }
        }
        let left = self.left()?;
        let Self { runtime, stack, cri, .. } = self;
        if !left.is_empty() {
            eprintln!("{}", stack.log_tails(15));
            failed.push(format!("left after every pod was removed: {}", left.join(", ")));
        }
        drop((cri, runtime));
        let stack = Arc::into_inner(stack).context("a case still holds the stack")?;
        if let Err(error) = stack.down() {
            failed.push(format!("{error:#}"));
        }
        // Once more at the end, so that they are easy to find.
        for reason in &failed {
            eprintln!("error: {reason}");
        }
        if failed.is_empty() {
            println!("nothing left behind, by the pods in the stack or by the stack on the host");
        }
        Ok(failed.is_empty())
    }
}
