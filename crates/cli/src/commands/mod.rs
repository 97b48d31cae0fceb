//! One file per command. To add one: a file with `Args` and `run`, and a `mod` and a variant here.

mod check;
mod checkpoint;
mod cluster;
mod compare;
mod completion;
mod config;
mod demo;
mod events;
mod idle;
mod inspect;
mod logs;
mod man;
mod mem_report;
mod place;
mod pods;
mod quarantine;
mod reload;
mod report;
mod stages;
mod startup;
mod template;
mod version;

use std::process::ExitCode;

use clap::Subcommand;

use crate::Global;

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    Pods(pods::Args),
    Place(place::Args),
    Inspect(inspect::Args),
    Logs(logs::Args),
    Events(events::Args),
    Version(version::Args),
    Check(check::Args),
    Demo(demo::Args),
    Stages(stages::Args),
    Template(template::Args),
    Checkpoint(checkpoint::Args),
    Quarantine(quarantine::Args),
    Reload(reload::Args),
    Idle(idle::Args),
    Startup(startup::Args),
    MemReport(mem_report::Args),
    Report(report::Args),
    Compare(compare::Args),
    Config(config::Args),
    Completion(completion::Args),
    Man(man::Args),
}

impl Command {
    /// Runs the command.
    pub async fn run(self, global: &Global) -> anyhow::Result<ExitCode> {
        let result = match self {
            Command::Check(args) => return check::run(args, global).await,
            Command::Pods(args) => pods::run(args, global).await,
            Command::Place(args) => place::run(args, global).await,
            Command::Inspect(args) => inspect::run(args, global).await,
            Command::Logs(args) => logs::run(args, global).await,
            Command::Events(args) => events::run(args, global).await,
            Command::Version(args) => version::run(args, global).await,
            Command::Demo(args) => demo::run(args, global).await,
            Command::Stages(args) => stages::run(args, global).await,
            Command::Checkpoint(args) => checkpoint::run(args, global).await,
            Command::Template(args) => template::run(args, global).await,
            Command::Quarantine(args) => quarantine::run(args, global).await,
            Command::Reload(args) => reload::run(args, global).await,
            Command::Idle(args) => idle::run(args, global).await,
            Command::Startup(args) => startup::run(args, global).await,
            Command::MemReport(args) => mem_report::run(args, global).await,
            Command::Report(args) => report::run(args, global),
            Command::Compare(args) => compare::run(args, global),
            Command::Config(args) => config::run(args),
            Command::Completion(args) => completion::run(args),
            Command::Man(args) => man::run(&args),
        };
        result.map(|()| ExitCode::SUCCESS)
    }

    /// Returns the exit code for an error of the command itself.
    pub fn exit_code_of_errors(&self) -> ExitCode {
        match self {
            // Exit code 1 means warnings for this command.
            Command::Check(_) => ExitCode::from(2),
            _ => ExitCode::FAILURE,
        }
    }

    /// Returns whether the command has JSON output.
    pub fn has_json(&self) -> bool {
        !matches!(
            self,
            Command::Demo(_)
                | Command::Logs(_)
                | Command::Idle(_)
                | Command::Config(_)
                | Command::Completion(_)
                | Command::Man(_)
        )
    }
}

/// Argument that selects a pod.
#[derive(Debug, clap::Args)]
pub struct PodId {
    /// Pod id, or a unique prefix of it
    #[arg(value_name = "ID", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub id: String,
}
