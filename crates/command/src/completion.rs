//! Completion scripts for shells.

use clap::Command;
use clap_complete::Shell;

use crate::output;

/// Prints the completion script of a program for a shell: bash, zsh or fish.
pub fn print(mut program: Command, shell: &str) -> anyhow::Result<()> {
    let shell: Shell = shell.parse().map_err(anyhow::Error::msg)?;
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut program, name, &mut script);
    Ok(output::print(String::from_utf8(script)?.trim_end())?)
}
