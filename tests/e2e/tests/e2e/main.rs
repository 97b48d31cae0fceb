//! The end-to-end cases. Every one gets the same stack and leaves nothing in it; those that restart the daemon
//! have it to themselves. Names are `handler::file::case`, so `-- sandboxer::streams` selects.
//!
//! `core.txt` names those that touch each promise once: `SANDBOXER_E2E_CORE=only` runs these, `except` all others.
//! `SANDBOXER_E2E_HANDLERS=runc` proves the cases without the daemon; `SANDBOXER_E2E_KEEP=1` leaves the stack up;
//! `SANDBOXER_E2E_ONLY=pool,shares::a_share` runs these files and those cases whose names begin so. `CONTAINERD_VERSION=1.7.27` runs them
//! beside that containerd, `SANDBOXER_E2E_DOCKER` adds those of docker, `SANDBOXER_E2E_CRIO` those of CRI-O, and `SANDBOXER_E2E_VERSIONS=docs/compatibility.md` writes what came of it into that document's table.

mod agents;
mod bandwidth;
mod checkpoint;
mod compatibility;
mod container;
mod daemon;
mod doors;
mod failure;
mod faults;
#[path = "../../../../crates/sandboxer/tests/hung_volume/mod.rs"]
mod hung_volume;
mod lifecycle;
mod many;
mod memory;
mod network;
mod parity;
mod placement;
mod pool;
mod probe;
mod resize;
mod sandbox;
mod scratch;
mod security;
mod shares;
mod snapshotters;
mod soak;
mod streams;
mod suite;
mod templates;
mod unit;
mod versions;
mod volumes;
mod worker;

use std::path::Path;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use libtest_mimic::{Arguments, Trial};
use sandboxer_e2e::case::Case;
use sandboxer_e2e::ledger;
use suite::Suite;

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
    /// As VmAlone, about a host with NUMA nodes; passed over, and counted, where there is one.
    Numa,
    /// As that, about the service under systemd; passed over, and counted, where process 1 is none.
    Systemd,
    /// As that, about the agent of the release before; passed over, and counted, where make has not built it.
    AgentBefore,
}

impl On {
    fn is_alone(self) -> bool {
        matches!(self, Self::VmAlone | Self::Numa | Self::Systemd | Self::AgentBefore)
    }

    fn is_possible(self) -> bool {
        match self {
            Self::Systemd => std::env::var_os("SANDBOXER_E2E_SYSTEMD").is_some(),
            Self::AgentBefore => agents::before().is_some(),
            Self::Numa => Path::new("/sys/devices/system/node/node1").exists(),
            Self::Any | Self::Vm | Self::VmAlone => true,
        }
    }
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
        agents::cases,
        bandwidth::cases,
        checkpoint::cases,
        compatibility::cases,
        container::cases,
        streams::cases,
        lifecycle::cases,
        sandbox::cases,
        scratch::cases,
        security::cases,
        shares::cases,
        snapshotters::cases,
        failure::cases,
        many::cases,
        memory::cases,
        network::cases,
        parity::cases,
        placement::cases,
        pool::cases,
        probe::cases,
        resize::cases,
        templates::cases,
        volumes::cases,
        daemon::cases,
        doors::ctr::cases,
        worker::cases,
        faults::cases,
        soak::cases,
        unit::cases,
    ];
    // Only make test-docker builds docker, and make test-crio CRI-O.
    let docker = doors::docker::is_there().then_some(doors::docker::cases as fn() -> Vec<Entry>);
    let crio = doors::crio::is_there().then_some(doors::crio::cases as fn() -> Vec<Entry>);
    files.into_iter().chain(docker).chain(crio).flat_map(|file| file()).collect()
}

/// Returns the names of all cases, each after each handler that it is for.
fn all_names() -> Vec<String> {
    let full_name = |handler: &str, entry: &Entry| format!("{handler}::{}", case_name(entry));
    let runc = entries().into_iter().filter(|entry| entry.on == On::Any);
    entries()
        .iter()
        .map(|entry| full_name("sandboxer", entry))
        .chain(runc.map(|entry| full_name("runc", &entry)))
        .collect()
}

/// Returns the name of a case: `file::case`.
fn case_name(entry: &Entry) -> &'static str {
    entry.name.trim_start_matches("e2e::")
}

/// Returns the cases that `core.txt` names, each after its handler.
fn core() -> Vec<&'static str> {
    include_str!("core.txt").lines().filter_map(|line| line.split_whitespace().next()).collect()
}

/// Returns whether `SANDBOXER_E2E_CORE`, if it is set, asks for this case of this handler.
fn is_requested(name: &str) -> Result<bool> {
    let is_core = core().contains(&name);
    match std::env::var("SANDBOXER_E2E_CORE").as_deref() {
        Ok("only") => Ok(is_core),
        Ok("except") => Ok(!is_core),
        Ok(other) => bail!("SANDBOXER_E2E_CORE={other}: only and except are what there is"),
        Err(_) => Ok(true),
    }
}

/// Returns whether `SANDBOXER_E2E_ONLY`, if it is set, names this case or its file.
fn is_selected(name: &str) -> bool {
    match std::env::var("SANDBOXER_E2E_ONLY") {
        Ok(only) => only.split(',').any(|part| match part.contains("::") {
            true => name.starts_with(part),
            false => name.split("::").any(|segment| segment == part),
        }),
        Err(_) => true,
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
    let mut names: Vec<(Entry, &'static str, String)> = wanted
        .iter()
        .flat_map(|&handler| entries().into_iter().map(move |entry| (entry, handler)))
        .filter(|(entry, handler)| *handler == "sandboxer" || entry.on == On::Any)
        .filter(|(entry, _)| is_selected(case_name(entry)))
        .map(|(entry, handler)| {
            let name = format!("{handler}::{}", case_name(&entry));
            (entry, handler, name)
        })
        .collect();
    if let Some(unknown) = core().iter().find(|core| !all_names().iter().any(|name| name == *core)) {
        bail!("core.txt names {unknown}, which is no case");
    }
    let requested = names.iter().map(|(_, _, name)| is_requested(name)).collect::<Result<Vec<_>>>()?;
    let mut requested = requested.into_iter();
    names.retain(|_| requested.next().unwrap_or_default());
    let idle = arguments.list
        || names.iter().all(|(_, _, name)| arguments.is_filtered_out(&Trial::test(name.as_str(), || Ok(()))));
    if idle {
        let trials = names.into_iter().map(|(_, _, name)| Trial::test(name, || Ok(()))).collect();
        return Ok(libtest_mimic::run(&arguments, trials).exit_code());
    }

    let suite = Arc::new(Suite::up(wanted.contains(&"sandboxer"))?);
    versions::check(&entries().iter().map(case_name).collect::<Vec<_>>())?;
    let trials = names
        .into_iter()
        .map(|(entry, handler, name)| {
            let suite = Arc::clone(&suite);
            let ignored = !entry.on.is_possible() || suite.is_not_applicable(&entry);
            Trial::test(name.clone(), move || suite.run(&entry, handler, &name)).with_ignored_flag(ignored)
        })
        .collect();
    // Two at a time: each guest keeps about one core busy while it boots.
    let arguments = Arguments { test_threads: arguments.test_threads.or(Some(2)), ..arguments };
    let conclusion = libtest_mimic::run(&arguments, trials);

    suite.print_outcomes();
    suite.write_versions()?;
    ledger::close()?;
    let suite = Arc::into_inner(suite).context("a case still holds the stack")?;
    let clean = suite.down()?;
    Ok(if clean { conclusion.exit_code() } else { ExitCode::FAILURE })
}
