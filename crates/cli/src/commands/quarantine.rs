//! `quarantine`: journal records that the daemon put aside because it cannot read them.

use std::io::{self, IsTerminal, Write};

use anyhow::{Context, bail};
use clap::Subcommand;
use sandboxer_protocol::admin::{
    DestroyQuarantinedRequest, ListQuarantineRequest, ListQuarantineResponse, Quarantined,
    ReleaseQuarantinedRequest, ShowQuarantinedRequest, ShowQuarantinedResponse,
};

use crate::{Global, client, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli quarantine list
  sandboxer-cli quarantine show 1763766320000000000-3f2a9c0d1122
  sandboxer-cli quarantine release 1763766320000000000-3f2a9c0d1122
  sandboxer-cli quarantine destroy --yes 1763766320000000000-3f2a9c0d1122

When the daemon starts, it puts records aside that it cannot read: damaged ones, and those of a later
version. The pod's VM keeps running unmanaged. Use `release` before you start the daemon version that
wrote the record. containerd may regard the pod as stopped by then; it stops and removes it as usual.
Use `destroy` for a pod that is not needed. Names cannot be abbreviated.";

/// Manage records of pods that the daemon cannot read
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the records in quarantine, and the pods' processes
    #[command(visible_alias = "ls")]
    List,
    /// Show why a record was put aside, what exists now, and the record's text, which may contain the
    /// key of the link to the pod's agent
    Show {
        /// Full name of the record
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Put records back; the next daemon that starts reads them
    Release {
        /// Full names of the records
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
    },
    /// Kill the pods' processes; remove their run directories and records
    Destroy {
        /// Full names of the records
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
        /// Do not ask for confirmation
        #[arg(long, short)]
        yes: bool,
    },
}

/// Runs the subcommand.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    if let Verb::Destroy { names, yes: false } = &args.verb {
        confirm(names)?;
    }
    let mut daemon = client::connect(&global.socket).await?;
    match args.verb {
        Verb::List => {
            let answer = client::answer(daemon.list_quarantine(ListQuarantineRequest {}).await)?;
            if global.json { render::print_json(&answer) } else { Ok(render::print(&text(&answer))?) }
        }
        Verb::Show { name } => {
            let answer = client::answer(daemon.show_quarantined(ShowQuarantinedRequest { name }).await)?;
            if global.json { render::print_json(&answer) } else { Ok(render::print(&whole(&answer))?) }
        }
        Verb::Release { names } => {
            let mut released = Vec::new();
            for name in names {
                released.push(client::answer(
                    daemon.release_quarantined(ReleaseQuarantinedRequest { name }).await,
                )?);
            }
            show(&released, global)
        }
        Verb::Destroy { names, .. } => {
            let mut destroyed = Vec::new();
            for name in names {
                destroyed.push(client::answer(
                    daemon.destroy_quarantined(DestroyQuarantinedRequest { name }).await,
                )?);
            }
            show(&destroyed, global)
        }
    }
}

/// Asks for confirmation on the terminal.
fn confirm(names: &[String]) -> anyhow::Result<()> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        bail!("stdin is no terminal to confirm on: use --yes (this cannot be undone)");
    }
    let names = render::plain(&names.join(", "));
    eprint!("Kill all processes of {names} and remove its files? [y/N] ");
    io::stderr().flush()?;
    let mut answer = String::new();
    stdin.read_line(&mut answer).context("cannot read the answer")?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => bail!("nothing was destroyed"),
    }
}

fn show(entries: &[Quarantined], global: &Global) -> anyhow::Result<()> {
    if global.json { render::print_json(&entries) } else { Ok(render::print(&table(entries))?) }
}

fn text(answer: &ListQuarantineResponse) -> String {
    if answer.entries.is_empty() {
        return "nothing is in quarantine".to_owned();
    }
    let mut out = table(&answer.entries);
    if answer.left_off > 0 {
        let all = render::bytes(answer.bytes);
        out += &format!("\n\n{} more are not listed; all of them use {all}", answer.left_off);
    }
    out
}

fn table(entries: &[Quarantined]) -> String {
    let header = ["NAME", "AGE", "SIZE", "RUN DIR", "PROCESSES", "PROBLEM"];
    render::table(header, entries.iter().map(row))
}

fn row(entry: &Quarantined) -> Vec<String> {
    vec![
        render::plain(&entry.name),
        render::age(entry.put_aside_at_ns),
        render::bytes(entry.bytes),
        if entry.run_dir_exists { "present" } else { "-" }.to_owned(),
        match processes(entry) {
            none if none.is_empty() => "-".to_owned(),
            some => some.join(", "),
        },
        // Each row is one line.
        render::plain(problem(entry)).replace(['\n', '\r'], " "),
    ]
}

/// Returns one entry in full.
fn whole(answer: &ShowQuarantinedResponse) -> String {
    let entry = answer.entry.clone().unwrap_or_default();
    let present = if entry.run_dir_exists { "" } else { " (missing)" };
    let mut out = String::new();
    for (what, is) in [
        ("Name", entry.name.clone()),
        ("Put aside", render::time(entry.put_aside_at_ns)),
        ("Pod", entry.pod.clone()),
        ("Path", entry.path.clone()),
        ("Problem", problem(&entry).to_owned()),
        ("Run dir", if entry.pod.is_empty() { String::new() } else { entry.run_dir.clone() + present }),
        ("Processes", processes(&entry).join(", ")),
        ("Size", render::bytes(entry.bytes)),
    ] {
        let is = if is.is_empty() { "-".to_owned() } else { render::plain(&is) };
        out += &format!("{what:<12}{is}\n");
    }
    let report = if answer.report.is_empty() { "none" } else { &answer.report };
    let cut = (answer.record.len() as u64) < entry.bytes;
    let cut = if cut { " (truncated)" } else { "" };
    out + &format!("\nReport\n{}\n\nRecord{cut}\n{}", render::plain(report), render::plain(&answer.record))
}

fn problem(entry: &Quarantined) -> &str {
    if entry.problem.is_empty() { "unknown: there is no report" } else { &entry.problem }
}

fn processes(entry: &Quarantined) -> Vec<String> {
    let line = |process: &sandboxer_protocol::admin::QuarantinedProcess| {
        format!("{} {}", process.pid, render::plain(&process.command))
    };
    entry.processes.iter().map(line).collect()
}
