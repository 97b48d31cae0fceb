//! `quarantine`: pods' records that the daemon put aside because it can't understand them.

use std::io::{self, IsTerminal, Write};

use anyhow::{Context, bail};
use clap::Subcommand;
use sandboxer_protocol::admin::{
    DestroyQuarantinedRequest, ListQuarantineRequest, ListQuarantineResponse, Quarantined,
    ReleaseQuarantinedRequest, ShowQuarantinedRequest, ShowQuarantinedResponse,
};

use crate::{Global, client, client::ClientError, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli quarantine list
  sandboxer-cli quarantine show 1763766320000000000-3f2a9c0d1122
  sandboxer-cli quarantine release 1763766320000000000-3f2a9c0d1122
  sandboxer-cli quarantine destroy --yes 1763766320000000000-3f2a9c0d1122

At its start the daemon puts a record aside that it cannot understand: torn, or a later version's. The
pod's VM is left alone; nobody manages it. `release` is for the daemon that wrote the record;
containerd may have taken the pod for stopped meanwhile, and stops and removes it as any other then.
`destroy` is for a pod that nobody needs. Names are given whole.";

/// Records of pods that can't be understood
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// What was put aside, and what runs of it
    #[command(visible_alias = "ls")]
    List,
    /// What was found then, what is there now, and the record's text, which may hold the key of the
    /// link to the pod's agent
    Show {
        /// An entry's whole name
        #[arg(value_name = "NAME")]
        name: String,
    },
    /// Put records back, for the next daemon that starts
    Release {
        /// Entries' whole names
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
    },
    /// End what runs of pods, remove their run directories and their records
    Destroy {
        /// Entries' whole names
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
        /// Don't ask
        #[arg(long, short)]
        yes: bool,
    },
}

/// Does what was asked for.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    if let Verb::Destroy { names, yes: false } = &args.verb {
        confirm(names)?;
    }
    let mut daemon = client::connect(&global.socket).await?;
    match args.verb {
        Verb::List => {
            let answer = daemon.list_quarantine(ListQuarantineRequest {}).await.map_err(ClientError::from)?;
            let answer = answer.into_inner();
            if global.json { render::print_json(&answer) } else { Ok(render::print(&text(&answer))?) }
        }
        Verb::Show { name } => {
            let answer = daemon.show_quarantined(ShowQuarantinedRequest { name }).await;
            let answer = answer.map_err(ClientError::from)?.into_inner();
            if global.json { render::print_json(&answer) } else { Ok(render::print(&whole(&answer))?) }
        }
        Verb::Release { names } => {
            let mut released = Vec::new();
            for name in names {
                let answer = daemon.release_quarantined(ReleaseQuarantinedRequest { name }).await;
                released.push(answer.map_err(ClientError::from)?.into_inner());
            }
            show(&released, global)
        }
        Verb::Destroy { names, .. } => {
            let mut destroyed = Vec::new();
            for name in names {
                let answer = daemon.destroy_quarantined(DestroyQuarantinedRequest { name }).await;
                destroyed.push(answer.map_err(ClientError::from)?.into_inner());
            }
            show(&destroyed, global)
        }
    }
}

/// Has a person say yes.
fn confirm(names: &[String]) -> anyhow::Result<()> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        bail!("destroying cannot be undone and nobody can be asked here: say --yes");
    }
    let asked = render::plain(&names.join(", "));
    eprint!("End what runs of {asked} and remove all that is left of it? [y/N] ");
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
        out += &format!("\n\n{} more are not listed; all together take {all}", answer.left_off);
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
        if entry.run_dir_exists { "there" } else { "-" }.to_owned(),
        match processes(entry) {
            none if none.is_empty() => "-".to_owned(),
            some => some.join(", "),
        },
        // A row is a line.
        render::plain(problem(entry)).replace(['\n', '\r'], " "),
    ]
}

/// Returns one entry in full.
fn whole(answer: &ShowQuarantinedResponse) -> String {
    let entry = answer.entry.clone().unwrap_or_default();
    let present = if entry.run_dir_exists { "" } else { ", which is not there" };
    let mut out = String::new();
    for (what, is) in [
        ("Name", entry.name.clone()),
        ("Put aside", render::time(entry.put_aside_at_ns)),
        ("Pod", entry.pod.clone()),
        ("Lay at", entry.path.clone()),
        ("Problem", problem(&entry).to_owned()),
        ("Run dir", if entry.pod.is_empty() { String::new() } else { entry.run_dir.clone() + present }),
        ("Processes", processes(&entry).join(", ")),
        ("Size", render::bytes(entry.bytes)),
    ] {
        let is = if is.is_empty() { "-".to_owned() } else { render::plain(&is) };
        out += &format!("{what:<12}{is}\n");
    }
    let report = if answer.report.is_empty() { "none was written" } else { &answer.report };
    let cut = (answer.record.len() as u64) < entry.bytes;
    let cut = if cut { ", its start" } else { "" };
    out + &format!("\nReport\n{}\n\nRecord{cut}\n{}", render::plain(report), render::plain(&answer.record))
}

fn problem(entry: &Quarantined) -> &str {
    if entry.problem.is_empty() { "not known: no report was written" } else { &entry.problem }
}

fn processes(entry: &Quarantined) -> Vec<String> {
    let told = |process: &sandboxer_protocol::admin::QuarantinedProcess| {
        format!("{} {}", process.pid, render::plain(&process.command))
    };
    entry.processes.iter().map(told).collect()
}
