//! The end-to-end cases. Every one gets the same stack and leaves nothing in it; those that restart the daemon
//! have it to themselves. Names are `handler::file::case`, so `-- sandboxer::streams` selects.
//!
//! `SANDBOXER_E2E_HANDLERS=runc` proves the cases without the daemon; `SANDBOXER_E2E_KEEP=1` leaves the stack up.

mod compatibility;
mod container;
mod daemon;
mod failure;
mod faults;
mod lifecycle;
mod many;
mod network;
mod probe;
mod sandbox;
mod security;
mod shares;
mod snapshotters;
mod soak;
mod streams;
mod templates;
mod volumes;
mod worker;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use sandboxer_e2e::case::Case;
use sandboxer_e2e::cri::Cri;
use sandboxer_e2e::ledger;
use sandboxer_e2e::stack::Stack;
use tokio::runtime::Runtime;

/// A case is given up after this long, unless SANDBOXER_E2E_LIMIT says otherwise, in seconds.
const LIMIT: Duration = Duration::from_secs(180);
/// One that has the stack to itself may be a long story of faults.
const LIMIT_ALONE: Duration = Duration::from_secs(900);

fn limit(on: On) -> Duration {
    let asked = std::env::var("SANDBOXER_E2E_LIMIT").ok().and_then(|seconds| seconds.parse().ok());
    asked.map_or(if on == On::VmAlone { LIMIT_ALONE } else { LIMIT }, Duration::from_secs)
}

type Outcome = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// A case as the files beside this one list it.
struct Entry {
    name: &'static str,
    run: fn(Case) -> Outcome,
    on: On,
}

/// Where a case means something.
#[derive(Clone, Copy, PartialEq)]
enum On {
    /// Any CRI runtime behaves so.
    Any,
    /// About microVMs.
    Vm,
    /// About microVMs, and disturbs other pods.
    VmAlone,
}

/// `cases![Any: first, second; Vm: third]` makes the list of a file's cases.
#[macro_export]
macro_rules! cases {
    ($($on:ident: $($name:ident),+);+ $(;)?) => {
        pub(crate) fn cases() -> Vec<$crate::Entry> {
            vec![$($($crate::Entry {
                name: concat!(module_path!(), "::", stringify!($name)),
                run: |case| Box::pin($name(case)),
                on: $crate::On::$on,
            }),+),+]
        }
    };
}

fn entries() -> Vec<Entry> {
    let files = [
        compatibility::cases,
        container::cases,
        streams::cases,
        lifecycle::cases,
        sandbox::cases,
        security::cases,
        shares::cases,
        snapshotters::cases,
        failure::cases,
        many::cases,
        network::cases,
        probe::cases,
        templates::cases,
        volumes::cases,
        daemon::cases,
        worker::cases,
        faults::cases,
        soak::cases,
    ];
    files.iter().flat_map(|file| file()).collect()
}

/// `file::case`.
fn case_name(entry: &Entry) -> &'static str {
    entry.name.trim_start_matches("e2e::")
}

/// What all cases share.
struct Suite {
    runtime: Runtime,
    stack: Arc<Stack>,
    cri: Cri,
    // Held for reading by a case, for writing by one that must be alone. Held across a whole case, by threads
    // of libtest-mimic that do nothing else.
    alone: RwLock<()>,
    /// What each case came to, and by which handler.
    outcomes: Mutex<BTreeMap<&'static str, BTreeMap<&'static str, &'static str>>>,
}

impl Suite {
    fn up(daemon: bool) -> Result<Self> {
        let started = Instant::now();
        let stack = Stack::up(daemon).context("could not start the stack")?;
        let runtime = Runtime::new()?;
        let cri = runtime.block_on(async { Cri::connect(stack.containerd_socket()?) })?;
        println!(
            "stack of this run: {}, up in {:.1} s",
            stack.dir().display(),
            started.elapsed().as_secs_f64()
        );
        Ok(Self { runtime, stack: Arc::new(stack), cri, alone: RwLock::new(()), outcomes: Mutex::default() })
    }

    fn run(&self, entry: &Entry, handler: &'static str, name: &str) -> Result<(), Failed> {
        let outcome = self.try_run(entry, handler, name);
        let word = if outcome.is_ok() { "ok" } else { "FAILED" };
        let mut outcomes = self.outcomes.lock().unwrap_or_else(|poison| poison.into_inner());
        outcomes.entry(case_name(entry)).or_default().insert(handler, word);
        outcome
    }

    /// One table: case, ours, runc.
    fn print_outcomes(&self) {
        let outcomes = self.outcomes.lock().unwrap_or_else(|poison| poison.into_inner());
        let width = outcomes.keys().map(|case| case.len()).max().unwrap_or_default();
        println!("\n{:width$}  sandboxer  runc", "case");
        for (case, by) in outcomes.iter() {
            let of = |handler| by.get(handler).copied().unwrap_or("-");
            println!("{case:width$}  {:9}  {}", of("sandboxer"), of("runc"));
        }
    }

    fn try_run(&self, entry: &Entry, handler: &'static str, name: &str) -> Result<(), Failed> {
        let (_alone, _together);
        if entry.on == On::VmAlone {
            _alone = self.alone.write().unwrap_or_else(|poison| poison.into_inner());
        } else {
            _together = self.alone.read().unwrap_or_else(|poison| poison.into_inner());
        }
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
                Err(_) => Err(anyhow::anyhow!("not over after {:?}", limit(entry.on))),
            };
            let cleaned = match tokio::time::timeout(LIMIT, case.clean_up()).await {
                Ok(cleaned) => cleaned.context("could not clean up"),
                Err(_) => Err(anyhow::anyhow!("clean-up not over after {LIMIT:?}")),
            };
            match (outcome, cleaned) {
                (Ok(()), Ok(())) => Ok(()),
                (Ok(()), Err(error)) | (Err(error), Ok(())) => Err(format!("{error:#}")),
                (Err(error), Err(other)) => Err(format!("{error:#}\nand {other:#}")),
            }
        })?;
        Ok(())
    }

    /// With every pod removed, the running stack must hold nothing of them, before it is taken down.
    fn check_empty(&self) -> Result<()> {
        let left = self.stack.held()?;
        ensure!(left.is_empty(), "left after every pod was removed:\n{}", left.join("\n"));
        Ok(())
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let arguments = Arguments::from_args();
    let handlers = std::env::var("SANDBOXER_E2E_HANDLERS").unwrap_or_else(|_| "sandboxer,runc".into());
    let mut wanted = Vec::new();
    for handler in ["sandboxer", "runc"] {
        if handlers.split(',').any(|name| name == handler) {
            wanted.push(handler);
        }
    }
    if wanted.is_empty() {
        bail!("SANDBOXER_E2E_HANDLERS={handlers}: sandboxer and runc are what there is");
    }

    // Listing and filtering everything out need no stack.
    let names: Vec<(Entry, &'static str, String)> = wanted
        .iter()
        .flat_map(|&handler| entries().into_iter().map(move |entry| (entry, handler)))
        .filter(|(entry, handler)| *handler == "sandboxer" || entry.on == On::Any)
        .map(|(entry, handler)| {
            let name = format!("{handler}::{}", case_name(&entry));
            (entry, handler, name)
        })
        .collect();
    let idle = arguments.list
        || names.iter().all(|(_, _, name)| arguments.is_filtered_out(&Trial::test(name.as_str(), || Ok(()))));
    if idle {
        let trials = names.into_iter().map(|(_, _, name)| Trial::test(name, || Ok(()))).collect();
        return Ok(libtest_mimic::run(&arguments, trials).exit_code());
    }

    let suite = Arc::new(Suite::up(wanted.contains(&"sandboxer"))?);
    let trials = names
        .into_iter()
        .map(|(entry, handler, name)| {
            let suite = Arc::clone(&suite);
            Trial::test(name.clone(), move || suite.run(&entry, handler, &name))
        })
        .collect();
    // Two at a time: each guest keeps about one core busy while it boots.
    let arguments = Arguments { test_threads: arguments.test_threads.or(Some(2)), ..arguments };
    let conclusion = libtest_mimic::run(&arguments, trials);

    suite.print_outcomes();
    ledger::close()?;
    let mut code = conclusion.exit_code();
    let Some(suite) = Arc::into_inner(suite) else { bail!("a case still holds the stack") };
    let empty = suite.check_empty();
    if conclusion.has_failed() || empty.is_err() {
        eprintln!("{}", suite.stack.log_tails(15));
    }
    let Suite { runtime, stack, cri, .. } = suite;
    drop((cri, runtime));
    let Some(stack) = Arc::into_inner(stack) else { bail!("a case still holds the stack") };
    let down = stack.down();
    let checks = [("stack with every pod removed", empty), ("host with the stack taken down", down)];
    for (what, result) in checks {
        match result {
            Ok(()) => println!("{what}: nothing left behind"),
            Err(error) => {
                eprintln!("error: {what}: {error:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}
