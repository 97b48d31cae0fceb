//! One file per command. To add one: a file with `Args` and `run`, and a `mod` and a variant here.

mod checkpoints;
mod completion;
mod gate;
mod man;
mod merge;
mod score;
mod streams;
mod summarise;
mod workload;

use clap::Subcommand;
use sandboxer_command::Global;

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    Workload(workload::Args),
    Streams(streams::Args),
    Checkpoints(checkpoints::Args),
    Score(score::Args),
    Merge(merge::Args),
    Gate(gate::Args),
    Summarise(summarise::Args),
    Completion(completion::Args),
    Man(man::Args),
}

impl Command {
    /// Runs the command.
    pub async fn run(self, global: &Global) -> anyhow::Result<()> {
        match self {
            Command::Workload(args) => workload::run(args, global).await,
            Command::Streams(args) => streams::run(args, global).await,
            Command::Checkpoints(args) => checkpoints::run(args, global).await,
            Command::Score(args) => score::run(args, global),
            Command::Merge(args) => merge::run(args, global),
            Command::Gate(args) => gate::run(args, global),
            Command::Summarise(args) => summarise::run(args, global),
            Command::Completion(args) => completion::run(args),
            Command::Man(args) => man::run(&args),
        }
    }

    /// Returns whether the command has JSON output.
    pub fn has_json(&self) -> bool {
        !matches!(self, Command::Completion(_) | Command::Man(_))
    }
}
