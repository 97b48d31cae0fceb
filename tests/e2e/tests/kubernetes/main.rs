//! A node with a real kubelet: each case runs on RuntimeClass `sandboxer` and on `runc`, and kubelet must see the same.
//! A difference is either in `differences.json`, with its reason, or fails the run; so does one that no longer shows.
//!
//! Only with `SANDBOXER_E2E_KUBERNETES=1`, which `make test-kubernetes` sets; elsewhere the test is counted as ignored.
//! `SANDBOXER_E2E_ONLY=probes,faults::vm_killed` selects files and cases; `first_hour` is what docs/first-hour.md has for a
//! cluster. `SANDBOXER_E2E_TABLE=docs/compatibility.md` writes what ran into the table of that document.
//! `SANDBOXER_E2E_KEEP=1` leaves the node up.

mod checkpoints;
mod faults;
mod lifecycle;
mod network;
mod node;
mod observed;
mod pods;
mod probes;
mod resources;
mod streams;
mod volumes;

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use libtest_mimic::{Arguments, Trial};
use node::Node;
use observed::Outcomes;
use pods::Run;
use sandboxer_e2e::page::Page;

const CLASSES: [&str; 2] = ["sandboxer", "runc"];

/// Cases at once: most of their time they wait for kubelet's periods.
const AT_ONCE: usize = 4;

/// A case as the files beside this one list it.
#[derive(Clone, Copy)]
struct Entry {
    name: &'static str,
    run: fn(&Run<'_>) -> Result<()>,
    /// Disturbs other pods. It runs on both classes at the same time all the same, if it is `alone` on each.
    is_alone: bool,
}

/// `cases![first, second]` makes the list of a file's cases; `cases![alone: …]` of those that disturb others.
#[macro_export]
macro_rules! cases {
    (alone: $($name:ident),+ $(,)?) => { $crate::cases!(@ true; $($name),+); };
    (@ $alone:expr; $($name:ident),+) => {
        pub(crate) fn cases() -> Vec<$crate::Entry> {
            vec![$($crate::Entry {
                name: concat!(module_path!(), "::", stringify!($name)),
                run: $name,
                is_alone: $alone,
            }),+]
        }
    };
    ($($name:ident),+ $(,)?) => { $crate::cases!(@ false; $($name),+); };
}

fn entries() -> Vec<Entry> {
    let files = [
        lifecycle::cases,
        streams::cases,
        probes::cases,
        network::cases,
        volumes::cases,
        resources::cases,
        checkpoints::cases,
        faults::cases,
    ];
    let all = files.iter().flat_map(|file| file());
    all.map(|entry| Entry { name: entry.name.trim_start_matches("kubernetes::"), ..entry }).collect()
}

/// Returns whether `SANDBOXER_E2E_ONLY`, if it is set, names this case or its file.
fn is_selected(name: &str) -> bool {
    let Ok(only) = std::env::var("SANDBOXER_E2E_ONLY") else { return true };
    only.split(',').any(|part| name == part || name.split("::").next() == Some(part))
}

fn main() -> ExitCode {
    let is_enabled = std::env::var_os("SANDBOXER_E2E_KUBERNETES").is_some();
    let trial = Trial::test("kubernetes::sees_what_it_sees_of_runc", || {
        run().map_err(|error| format!("{error:#}").into())
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial.with_ignored_flag(!is_enabled)]).exit_code()
}

fn run() -> Result<()> {
    let all = entries();
    let known = observed::known()?;
    observed::check(&known, &all.iter().map(|entry| entry.name).collect::<Vec<_>>())?;
    let began = Instant::now();
    let node = Node::up()?;
    println!("node: {}, up in {:.1} s", node.stack().dir().display(), began.elapsed().as_secs_f64());
    let selected: Vec<_> = all.into_iter().filter(|entry| is_selected(entry.name)).collect();
    let page = if is_selected("first_hour") { first_hour(&node) } else { Ok(()) };
    let outcomes = Mutex::new(Outcomes::new());
    let (alone, together): (Vec<Entry>, Vec<Entry>) = selected.into_iter().partition(|entry| entry.is_alone);
    run_all(&node, &together, AT_ONCE, &outcomes);
    run_all(&node, &alone, 1, &outcomes);

    let outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    let verdicts = observed::judge(&outcomes, &known);
    let table = observed::table(&verdicts);
    println!("\n{table}\nall in {:.0} s", began.elapsed().as_secs_f64());
    if let Some(document) = std::env::var_os("SANDBOXER_E2E_TABLE") {
        let head = format!(
            "Kubernetes {}, {}, handler `sandboxer` beside `runc`.",
            node.version()?,
            node.containerd_version()?
        );
        observed::put_into(document.as_ref(), &head, &verdicts)?;
    }
    let errors: Vec<_> = verdicts
        .iter()
        .flat_map(|verdict| verdict.errors.iter().map(|error| format!("{}: {error}", verdict.case)))
        .chain(page.err().map(|error| format!("{error:#}")))
        .collect();
    if !errors.is_empty() {
        eprintln!("{}", node.stack().log_tails(15));
    }
    let down = node.down();
    ensure!(errors.is_empty(), "kubelet saw what it does not see of runc:\n{}", errors.join("\n"));
    down
}

/// Runs what docs/first-hour.md has for a cluster.
fn first_hour(node: &Node) -> Result<()> {
    let page = Page::read("first-hour.md")?;
    let dir = tempfile::tempdir()?;
    let mut reader = page.at("cluster", dir.path())?;
    let path = std::env::var("PATH").unwrap_or_default();
    reader.set("PATH", format!("{}:{path}", node.stack().dir().join("bin").display()));
    reader.run("class")?;
    // This cluster has no scheduler, whose part for this one pod is played here.
    let output = thread::scope(|scope| {
        let placed = scope.spawn(|| node.place("first"));
        let output = reader.run("pod");
        placed.join().unwrap_or_else(|_| bail!("cannot place the pod")).and(output)
    })?;
    ensure!(output.contains("hello from Linux ") && output.contains("-sandboxer"), "{output}");
    reader.end()
}

/// Runs cases on both classes, so many at a time.
fn run_all(node: &Node, entries: &[Entry], at_once: usize, outcomes: &Mutex<Outcomes>) {
    let jobs = entries.iter().flat_map(|entry| CLASSES.map(|class| (*entry, class)));
    let jobs = Mutex::new(jobs.collect::<VecDeque<_>>());
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let Some((entry, class)) = lock(&jobs).pop_front() else { return };
                    let began = Instant::now();
                    let run = Run::new(node, class, entry.name);
                    let outcome = (entry.run)(&run);
                    let outcome = run.end(outcome);
                    let how = outcome.failed.as_deref().unwrap_or("over");
                    println!("{class:9} {}: {how} ({:.1} s)", entry.name, began.elapsed().as_secs_f64());
                    lock(outcomes).entry(entry.name).or_default().insert(class, outcome);
                }
            });
        }
    });
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
