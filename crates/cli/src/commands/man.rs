//! `man`: man pages of this program, of each of its commands, and of the daemon.

use std::{fs, io, path::Path, path::PathBuf};

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_mangen::{
    Man,
    roff::{Roff, roman},
};

use crate::Cli;

#[allow(dead_code, reason = "a page needs the options, not their values")]
#[path = "../../../sandboxer/src/options.rs"]
mod daemon;

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli man ~/.local/share/man
  man sandboxer-cli-check";

/// Manual to which each page belongs, as its footer names it.
const MANUAL: &str = concat!("sandboxer ", env!("CARGO_PKG_VERSION"));

/// Write the man pages of all commands and of the daemon
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directory for man1/sandboxer-cli.1, man1/sandboxer-cli-pods.1, …, man8/sandboxer.8
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Writes the pages.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let (commands, daemons) = (args.dir.join("man1"), args.dir.join("man8"));
    for dir in [&commands, &daemons] {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {dir:?}"))?;
    }
    let mut cli = Cli::command().disable_help_subcommand(true);
    cli.build();
    write_all(&cli, &commands)?;
    write(daemon::Options::command(), "8", &daemons)
}

/// Writes the pages of a command and its subcommands.
fn write_all(command: &Command, dir: &Path) -> anyhow::Result<()> {
    write(command.clone(), "1", dir)?;
    command.get_subcommands().try_for_each(|part| write_all(part, dir))
}

fn write(command: Command, section: &str, dir: &Path) -> anyhow::Result<()> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let path = dir.join(format!("{name}.{section}"));
    let mut page = Vec::new();
    render(command, section, &mut page)?;
    fs::write(&path, page).with_context(|| format!("cannot write {path:?}"))
}

fn render(command: Command, section: &str, page: &mut Vec<u8>) -> io::Result<()> {
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let has_parts = command.has_subcommands();
    let man = Man::new(command).section(section).source(MANUAL).manual("sandboxer");
    man.render_title(page)?;
    man.render_name_section(page)?;
    man.render_synopsis_section(page)?;
    man.render_description_section(page)?;
    man.render_options_section(page)?;
    if has_parts {
        man.render_subcommands_section(page)?;
    }
    for paragraph in after.split("\n\n") {
        paragraph_of_help(paragraph).to_writer(page)?;
    }
    Ok(())
}

/// Returns a section with the help's text after the options. Its lines are kept as they are: most are examples.
fn paragraph_of_help(text: &str) -> Roff {
    let mut roff = Roff::default();
    let (heading, body) = match text.split_once(':') {
        Some(("Examples", body)) => ("EXAMPLES", body),
        Some(("Exit codes", body)) => ("EXIT STATUS", body),
        _ => ("NOTES", text),
    };
    if body.trim().is_empty() {
        return roff;
    }
    roff.control("SH", [heading]);
    roff.control("nf", []);
    for line in body.trim_start_matches('\n').lines() {
        roff.text([roman(line.trim_start())]);
    }
    roff.control("fi", []);
    roff
}
