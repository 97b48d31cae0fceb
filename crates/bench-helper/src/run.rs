//! Runs a tool: prints the facts, runs preparation steps, then executes the tool in its place.
//!
//! Each run thus reports its resources, and the tool is the container's process, with its exit code and output.

use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::facts::Facts;

/// Word that ends a preparation step.
const END_OF_STEP: &str = ";";

/// Print this container's facts on stderr, then execute a tool
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Port; a line on stderr reports when the tool listens on it
    #[arg(long)]
    announce: Option<u16>,
    /// Directory to run in
    #[arg(long = "in", value_name = "DIR")]
    directory: Option<PathBuf>,
    /// The tool; commands before a ';' run first, with their output on stderr
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Executes the tool. Returns only on failure.
pub fn run(args: &Args) -> Result<()> {
    eprintln!("{}", Facts::of_container().line()?);
    if let Some(directory) = &args.directory {
        std::env::set_current_dir(directory)
            .with_context(|| format!("cannot enter {}", directory.display()))?;
    }
    let mut steps: Vec<&[String]> = args.words.split(|word| word == END_OF_STEP).collect();
    let tool = steps.pop().unwrap_or_default();
    for step in steps {
        prepare(step)?;
    }
    let mut tool = command(tool)?;
    if let Some(port) = args.announce {
        announcer(port)?;
    }
    let failed = tool.exec();
    Err(failed).with_context(|| format!("cannot run {:?}", tool.get_program()))
}

fn command(words: &[String]) -> Result<Command> {
    let (program, arguments) = words.split_first().context("a step has no program")?;
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}

/// Runs a preparation step. Its output goes to stderr.
fn prepare(words: &[String]) -> Result<()> {
    let mut step = command(words)?;
    step.stdin(Stdio::null()).stdout(std::io::stderr());
    let status = step.status().with_context(|| format!("cannot run {}", words[0]))?;
    ensure!(status.success(), "{} failed: {status}", words.join(" "));
    Ok(())
}

/// Starts a process that reports when the port is listened on, because this one becomes the tool.
fn announcer(port: u16) -> Result<()> {
    let mut announcer = Command::new("/proc/self/exe");
    announcer.arg("announce").arg(port.to_string()).stdin(Stdio::null()).stdout(Stdio::null());
    match announcer.spawn() {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(error).context("/proc is not mounted"),
        Err(error) => Err(error).context("cannot start a process that announces the port"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_step_that_fails_is_named_with_its_status() {
        let error = prepare(&words("false --with argument")).unwrap_err().to_string();
        assert!(error.contains("false --with argument") && error.contains('1'), "{error}");
        prepare(&words("true")).unwrap();
    }

    #[test]
    fn a_tool_that_is_not_there_is_named() {
        let args = Args { announce: None, directory: None, words: words("no-such-tool-at-all") };
        assert!(run(&args).unwrap_err().to_string().contains("no-such-tool-at-all"));
        let args = Args { directory: Some("/no/such".into()), ..args };
        assert!(run(&args).unwrap_err().to_string().contains("/no/such"));
    }
}
