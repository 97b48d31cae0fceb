//! `check`: checks whether this host can run pods.

mod containerd_config;
mod crio_config;
mod docker_config;

use std::{path::PathBuf, process::ExitCode};

use comfy_table::{ContentArrangement, presets};
use sandboxer_doctor::{Check, Question, Report, Verdict};

use crate::{Global, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli check
  sandboxer-cli check --fix-hints --pods 100
  sandboxer-cli check --json | jq -r '.checks[] | select(.verdict == \"failure\") | .seen'
  sandboxer-cli check --containerd-config > /etc/containerd/conf.d/sandboxer.toml
  sandboxer-cli check --containerd-config --apply /etc/containerd/config.toml
  sandboxer-cli check --containerd-config --apply /etc/containerd/config.toml --write
  sandboxer-cli check --docker-config > /etc/docker/daemon.json
  sandboxer-cli check --crio-config > /etc/crio/crio.conf.d/50-sandboxer.conf

Exit codes: 0 no problems, 1 warnings, 2 failures. The checks change nothing. --apply shows what would
change in FILE; with --write it changes FILE.";

/// Maximum width of the table, columns.
const WIDTH: u16 = 100;
/// Indentation of a command.
const INDENT: &str = "  ";

/// Check whether this host can run pods: KVM, containerd, programs, network, memory, limits
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print fixes for warnings and failures, as commands where possible (JSON always contains them)
    #[arg(long)]
    fix_hints: bool,
    /// Number of pods that memory, disk and limits must suffice for
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pods: u32,
    /// The daemon's configuration file [default: /etc/sandboxer/config.toml, if it exists]
    #[arg(long, value_name = "FILE", env = "SANDBOXER_CONFIG")]
    config: Option<PathBuf>,
    /// CRI endpoint of containerd
    #[arg(
        long,
        env = "CONTAINER_RUNTIME_ENDPOINT",
        default_value = "unix:///run/containerd/containerd.sock"
    )]
    endpoint: String,
    /// Do not check; print the settings that the running containerd needs
    #[arg(long, conflicts_with_all = ["fix_hints", "json"])]
    containerd_config: bool,
    /// Do not check; print the settings that docker's daemon needs
    #[arg(long, conflicts_with_all = ["fix_hints", "json", "containerd_config"])]
    docker_config: bool,
    /// Do not check; print the settings that CRI-O needs
    #[arg(long, conflicts_with_all = ["fix_hints", "json", "containerd_config", "docker_config"])]
    crio_config: bool,
    /// Show what merging these settings into containerd's configuration FILE would change
    #[arg(long, value_name = "FILE", requires = "containerd_config")]
    apply: Option<PathBuf>,
    /// Write FILE
    #[arg(long, requires = "apply")]
    write: bool,
}

/// Runs the checks and returns the exit code. An error of this command itself counts as a failure.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    if args.containerd_config {
        return containerd_config::run(&args).await.map(|()| ExitCode::SUCCESS);
    }
    if args.docker_config {
        return docker_config::run(&args).map(|()| ExitCode::SUCCESS);
    }
    if args.crio_config {
        return crio_config::run(&args).map(|()| ExitCode::SUCCESS);
    }
    let question =
        Question { config_path: args.config.as_deref(), endpoint: &args.endpoint, pods: args.pods };
    let report = sandboxer_doctor::examine(&question).await;
    if global.json {
        render::print_json(&report)?;
    } else {
        render::print(&text(&report, args.fix_hints))?;
    }
    Ok(ExitCode::from(report.exit_code()))
}

fn text(report: &Report, hints: bool) -> String {
    let mut table = comfy_table::Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(WIDTH)
        .set_header(["CHECK", "VERDICT", "SEEN"])
        .add_rows(report.checks.iter().map(row));
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let mut text = table.trim_fmt();
    let [failures, warnings] = [Verdict::Failure, Verdict::Warning].map(|verdict| report.count(verdict));
    text += &format!("\n\n{}, {}", pluralize(failures, "failure"), pluralize(warnings, "warning"));
    let concerns: Vec<_> = report.checks.iter().filter(|check| check.verdict >= Verdict::Warning).collect();
    if hints {
        concerns.into_iter().for_each(|check| text += &hint(check));
    } else if !concerns.is_empty() {
        text += "; --fix-hints prints fixes";
    }
    text
}

fn row(check: &Check) -> [String; 3] {
    [check.name.to_owned(), check.verdict.to_string(), render::plain(&check.seen)]
}

fn pluralize(count: usize, noun: &str) -> String {
    match count {
        0 => format!("no {noun}s"),
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

/// Returns the fixes as a shell script, with text as comments.
fn hint(check: &Check) -> String {
    let Some(fix) = &check.fix else { return String::new() };
    let mut text = format!("\n\n# {} ({}): {}.", check.name, check.verdict, check.why);
    fix.what.lines().for_each(|line| text += &format!("\n# {}", render::plain(line)));
    fix.commands.iter().for_each(|command| text += &format!("\n{INDENT}{}", render::plain(command)));
    text
}

#[cfg(test)]
mod tests {
    use sandboxer_doctor::Fix;

    use super::*;

    fn check(name: &'static str, verdict: Verdict, seen: &str, fix: Option<Fix>) -> Check {
        Check { name, verdict, seen: seen.into(), why: "doors keep the wind out", fix }
    }

    fn report() -> Report {
        let fix = Fix::commands("shut it", ["shut door"]);
        let seen = "a very long tale of a door that is open, ".repeat(8);
        Report {
            schema: 1,
            verdict: Verdict::Warning,
            pods: 1,
            checks: vec![
                check("door", Verdict::Warning, &seen, Some(fix)),
                check("wall", Verdict::Ok, "stands\x1b[2J", None),
                check("sha-256", Verdict::Ok, &"5e".repeat(80), None),
            ],
        }
    }

    #[test]
    fn the_table_fits_and_says_where_help_is() {
        let text = text(&report(), false);
        assert!(text.lines().all(|line| line.chars().count() <= usize::from(WIDTH)), "{text}");
        assert!(text.ends_with("no failures, 1 warning; --fix-hints prints fixes"), "{text}");
        assert!(text.contains("stands^[[2J") && !text.contains("shut it"), "{text}");
    }

    #[test]
    fn hints_are_comments_and_commands() {
        let text = text(&report(), true);
        let hint = "\n\n# door (warning): doors keep the wind out.\n# shut it\n  shut door";
        assert!(text.ends_with(hint), "{text}");
    }
}
