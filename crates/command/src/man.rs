//! Man pages of a program and of each of its commands.

use std::{fs, io, path::Path};

use anyhow::Context;
use clap::Command;
use clap_mangen::{
    Man,
    roff::{Roff, roman},
};

/// Manual to which each page belongs, as its footer names it.
const MANUAL: &str = concat!("sandboxer ", env!("CARGO_PKG_VERSION"));

/// Writes the pages of a program and of its commands into `dir`/man1.
pub fn program(program: Command, dir: &Path) -> anyhow::Result<()> {
    let mut program = program.disable_help_subcommand(true);
    program.build();
    pages(&program, dir)
}

fn pages(command: &Command, dir: &Path) -> anyhow::Result<()> {
    page(command.clone(), "1", dir)?;
    command.get_subcommands().try_for_each(|part| pages(part, dir))
}

/// Writes the page of a command into the section's directory in `dir`.
pub fn page(command: Command, section: &str, dir: &Path) -> anyhow::Result<()> {
    let dir = dir.join(format!("man{section}"));
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {dir:?}"))?;
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
