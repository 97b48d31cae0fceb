//! What is asked of the daemon is asked of runc, too, and both must say the same: random sequences of requests about
//! containers, below CRI and by it, with restarts of containerd and deaths of the daemon's processes between them; and random images,
//! of which a container must see the same.
//! A difference either has a reason in `known.rs` or fails the run, which then shows the shortest sequence that has it.
//!
//! Only with `SANDBOXER_E2E_DIFFERENTIAL=SECONDS`, which `make test-differential SECONDS=…` sets; elsewhere the test is counted
//! as ignored. `SANDBOXER_E2E_SEED=7` is that seed again, `SANDBOXER_E2E_SEED=7:23` its sequence 23 alone, and
//! `SANDBOXER_E2E_SEED='7:killed before its start'` the fixed sequence of that name (`steps.rs: corpus`).
//! `SANDBOXER_E2E_HANDLERS=runc` compares runc with itself: what differs then is the test's own fault.

mod events;
mod images;
mod known;
mod parts;
mod side;
mod steps;
mod tasks;
mod tree;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use images::Images;
use libtest_mimic::{Arguments, Trial};
use sandboxer_e2e::case::Case;
use sandboxer_e2e::containerd::Containerd;
use sandboxer_e2e::cri::Cri;
use sandboxer_e2e::failing::Failing;
use sandboxer_e2e::stack::Stack;
use steps::{STREAMS, corpus};
use tasks::Run;

fn main() -> ExitCode {
    let seconds = std::env::var("SANDBOXER_E2E_DIFFERENTIAL").ok();
    let is_enabled = seconds.is_some();
    let seconds = seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or(60);
    let trial = |name: &str, subject: Subject| {
        let run =
            move || run(Duration::from_secs(seconds), subject).map_err(|error| format!("{error:#}").into());
        Trial::test(format!("differential::{name}"), run).with_ignored_flag(!is_enabled)
    };
    let trials = vec![trial("tasks", Subject::Tasks), trial("images", Subject::Images)];
    // One stack at a time.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// What is compared.
#[derive(Clone, Copy)]
enum Subject {
    Tasks,
    Images,
}

/// Returns the seed, and which of its sequences alone is asked for.
fn seed() -> Result<(u64, Option<u64>)> {
    let Ok(text) = std::env::var("SANDBOXER_E2E_SEED") else { return Ok((rand::random(), None)) };
    let (seed, only) = text.split_once(':').map_or((text.as_str(), None), |(seed, only)| (seed, Some(only)));
    let seed = seed.parse().with_context(|| format!("SANDBOXER_E2E_SEED={text}: {seed:?} is no number"))?;
    let Some(only) = only else { return Ok((seed, None)) };
    let fixed = corpus();
    let named = fixed.iter().position(|fixed| fixed.name == only).map(|number| number as u64);
    let only = named.or_else(|| only.parse().ok()).with_context(|| {
        let names = fixed.iter().map(|fixed| fixed.name).collect::<Vec<_>>();
        format!("SANDBOXER_E2E_SEED={text}: {only:?} is neither a number nor one of {names:#?}")
    })?;
    Ok((seed, Some(only)))
}

fn run(time: Duration, subject: Subject) -> Result<()> {
    let (seed, only) = seed()?;
    let ours = match std::env::var("SANDBOXER_E2E_HANDLERS").as_deref() {
        Ok("runc") => "runc",
        _ => "sandboxer",
    };
    let began = Instant::now();
    let stack = Arc::new(Stack::up(ours == "sandboxer").context("cannot start the stack")?);
    println!(
        "stack of this run: {}, up in {:.1} s; seed {seed}, {time:?}",
        stack.dir().display(),
        began.elapsed().as_secs_f64()
    );
    let runtime = tokio::runtime::Runtime::new()?;
    let compared = runtime.block_on(async {
        let cri = Cri::connect(stack.containerd_socket()?)?;
        let case = |handler: &'static str, name: &str| Case {
            stack: Arc::clone(&stack),
            cri: cri.clone(),
            handler,
            name: format!("differential-{name}"),
        };
        let containerd = Containerd::of_stack(&stack)?;
        let cases = [case("runc", "control"), case(ours, "subject")];
        let [runc, ours] = cases.clone();
        let failing = match ours.in_vm() {
            true => Some(Failing::start(&cases[1], Some(STREAMS)).await?),
            false => None,
        };
        let end = Instant::now() + time;
        let compared = match subject {
            Subject::Tasks => Run::new(runc, ours, containerd).await?.until(end, seed, only).await,
            Subject::Images => Images::new(runc, ours)?.until(end, seed, only).await,
        };
        if compared.is_err() {
            eprintln!("{}", stack.log_tails(15));
        }
        for case in &cases {
            if let Err(error) = case.clean_up().await {
                println!("{}: {error:#}", case.handler);
            }
        }
        if let Some(failing) = failing {
            failing.end().await?;
        }
        let left = stack.left().await?;
        compared.and_then(|()| {
            ensure!(left.is_empty(), "left after every pod was removed: {}", left.join(", "));
            Ok(())
        })
    });
    drop(runtime);
    let down = Arc::into_inner(stack).context("somebody still holds the stack")?.down();
    compared.and(down)
}
