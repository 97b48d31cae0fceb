//! `checkpoint`: pods that are saved while they run.

mod archive;

use std::{path::PathBuf, time::Duration};

use anyhow::bail;
use clap::Subcommand;
use indicatif::ProgressBar;
use sandboxer_protocol::admin::{
    Checkpoint, CreateCheckpointRequest, ExportCheckpointRequest, ImportCheckpointRequest,
    InspectCheckpointRequest, ListCheckpointsRequest, RemoveCheckpointRequest,
};

use crate::{Global, client, client::ClientError, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli checkpoint create 3f2a warm         save a running pod, which goes on
  sandboxer-cli checkpoint create --stop 3f2a warm  save it and end it
  sandboxer-cli checkpoint list
  sandboxer-cli checkpoint inspect -n shop warm     show it, and verify its checksums
  sandboxer-cli checkpoint remove -n shop warm
  sandboxer-cli checkpoint export -n shop warm warm.zst
  sandboxer-cli checkpoint import warm.zst          on another node, with the same VMM, processor and kernel
  sandboxer-cli checkpoint export warm - | ssh node2 sandboxer-cli checkpoint import -

A new pod of the same namespace with the annotation `io.sandboxer.restore-from: warm` goes on where the
saved pod was. Its containers must have the names, images, commands and volumes of the saved ones. A
checkpoint holds the memory of the pod, with everything secret in it.";

/// Save running pods, from which new pods go on
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Save a running pod; it is paused meanwhile, and goes on unless it is to end
    Create {
        /// Pod id, or a unique prefix of it
        #[arg(value_name = "POD", value_parser = clap::builder::NonEmptyStringValueParser::new())]
        pod: String,
        /// Name of the checkpoint, in the pod's namespace
        #[arg(value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
        name: String,
        /// End the pod when it is saved; nothing in it runs in between
        #[arg(long)]
        stop: bool,
    },
    /// List all checkpoints
    #[command(visible_alias = "ls")]
    List,
    /// Show a checkpoint, and verify its checksums
    Inspect {
        /// Name of the checkpoint
        #[arg(value_name = "NAME")]
        name: String,
        /// Namespace of the checkpoint
        #[arg(long, short, value_name = "NAMESPACE", default_value = "default")]
        namespace: String,
    },
    /// Remove checkpoints; pods that were restored from them go on
    #[command(visible_alias = "rm")]
    Remove {
        /// Names of the checkpoints
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
        /// Namespace of the checkpoints
        #[arg(long, short, value_name = "NAMESPACE", default_value = "default")]
        namespace: String,
    },
    /// Write a checkpoint to a file, for another node
    Export {
        /// Name of the checkpoint
        #[arg(value_name = "NAME")]
        name: String,
        /// New file for it, which only its owner can read; -: stdout
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Namespace of the checkpoint
        #[arg(long, short, value_name = "NAMESPACE", default_value = "default")]
        namespace: String,
    },
    /// Make a checkpoint of an exported one
    Import {
        /// The exported file; -: stdin
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Namespace of the new checkpoint [default: that of the exported one]
        #[arg(long, short, value_name = "NAMESPACE")]
        namespace: Option<String>,
        /// Name of the new checkpoint [default: that of the exported one]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
}

/// Runs the subcommand.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let mut daemon = client::connect(&global.socket).await?;
    match args.verb {
        Verb::Create { pod, name, stop } => {
            let waiting = ProgressBar::new_spinner().with_message("saving the pod");
            waiting.enable_steady_tick(Duration::from_millis(100));
            let answers = daemon.create_checkpoint(CreateCheckpointRequest { pod, name, stop }).await;
            let checkpoint = answers.map_err(ClientError::from)?.into_inner().message().await;
            waiting.finish_and_clear();
            let Some(checkpoint) = checkpoint.map_err(ClientError::from)? else {
                bail!("the daemon ended before the pod was saved")
            };
            show(&[checkpoint], global)
        }
        Verb::List => {
            let answer = client::answer(daemon.list_checkpoints(ListCheckpointsRequest {}).await)?;
            show(&answer.checkpoints, global)
        }
        Verb::Inspect { name, namespace } => {
            let checkpoint = client::answer(
                daemon.inspect_checkpoint(InspectCheckpointRequest { namespace, name }).await,
            )?;
            if global.json {
                render::print_json(&checkpoint)?;
            } else if checkpoint.problem.is_empty() {
                render::print(&whole(&checkpoint))?;
            }
            match checkpoint.problem.as_str() {
                "" => Ok(()),
                problem => bail!(
                    "checkpoint {} cannot be used: {}",
                    render::plain(&checkpoint.name),
                    render::plain(problem)
                ),
            }
        }
        Verb::Remove { names, namespace } => {
            let mut removed = Vec::new();
            for name in names {
                let request = RemoveCheckpointRequest { namespace: namespace.clone(), name };
                removed.push(client::answer(daemon.remove_checkpoint(request).await)?);
            }
            show(&removed, global)
        }
        Verb::Export { name, file, namespace } => {
            let progress = copying("exporting");
            let request = ExportCheckpointRequest { namespace, name };
            let written = archive::export(&mut daemon, request, &file, &progress).await;
            progress.finish_and_clear();
            match written? {
                Some(bytes) if global.json => {
                    render::print_json(&serde_json::json!({ "file": file.to_string_lossy(), "bytes": bytes }))
                }
                Some(bytes) => {
                    let file = render::plain(&file.to_string_lossy());
                    Ok(render::print(&format!("{file}: {}", render::bytes(bytes)))?)
                }
                // The output is the archive.
                None => Ok(()),
            }
        }
        Verb::Import { file, namespace, name } => {
            let (namespace, name) = (namespace.unwrap_or_default(), name.unwrap_or_default());
            let progress = copying("importing");
            let first = ImportCheckpointRequest { namespace, name, data: Vec::new() };
            let checkpoint = archive::import(&mut daemon, first, &file, &progress).await;
            progress.finish_and_clear();
            show(&[checkpoint?], global)
        }
    }
}

fn copying(what: &'static str) -> ProgressBar {
    let progress = ProgressBar::new_spinner().with_message(what);
    let style = indicatif::ProgressStyle::with_template("{spinner} {msg} {bytes} at {bytes_per_sec}");
    let progress = style.map(|style| progress.clone().with_style(style)).unwrap_or(progress);
    progress.enable_steady_tick(Duration::from_millis(100));
    progress
}

fn show(checkpoints: &[Checkpoint], global: &Global) -> anyhow::Result<()> {
    if global.json {
        return render::print_json(&checkpoints);
    }
    Ok(render::print(&match checkpoints {
        [] => "no checkpoints".to_owned(),
        some => table(some),
    })?)
}

fn table(checkpoints: &[Checkpoint]) -> String {
    let header = ["NAMESPACE", "NAME", "AGE", "STORED", "PAUSED", "CONTAINERS", "STATE"];
    render::table(header, checkpoints.iter().map(row))
}

fn row(checkpoint: &Checkpoint) -> Vec<String> {
    let known = checkpoint.problem.is_empty();
    let or_none = |text: String| if known { text } else { "-".to_owned() };
    let names: Vec<_> = checkpoint.containers.iter().map(|container| container.name.as_str()).collect();
    vec![
        render::plain(&checkpoint.namespace),
        render::plain(&checkpoint.name),
        or_none(render::age(checkpoint.made_at_ns)),
        or_none(render::bytes(checkpoint.stored_bytes)),
        or_none(paused(checkpoint)),
        or_none(render::plain(&names.join(", "))),
        if known {
            "ready".to_owned()
        } else {
            render::plain(&checkpoint.problem).replace(['\n', '\r'], " ")
        },
    ]
}

fn paused(checkpoint: &Checkpoint) -> String {
    format!("{} ms", checkpoint.paused_ns / 1_000_000)
}

/// Returns one checkpoint in full.
fn whole(checkpoint: &Checkpoint) -> String {
    let mut out = String::new();
    let vm = format!(
        "{} vCPU, {}, {} interfaces",
        checkpoint.vcpus,
        render::mib(checkpoint.memory_mib),
        checkpoint.interfaces
    );
    let vmm = format!("{} {} {}", checkpoint.vmm, checkpoint.vmm_version, checkpoint.accelerator);
    for (what, is) in [
        ("Name", checkpoint.name.clone()),
        ("Namespace", checkpoint.namespace.clone()),
        ("Pod", format!("{} {}", checkpoint.pod, checkpoint.pod_name)),
        (
            "Made",
            if checkpoint.made_at_ns == 0 { String::new() } else { render::time(checkpoint.made_at_ns) },
        ),
        ("Paused for", paused(checkpoint)),
        ("Stored", render::bytes(checkpoint.stored_bytes)),
        ("VM", vm),
        ("VMM", vmm),
    ] {
        let is = if is.trim().is_empty() { "-".to_owned() } else { render::plain(&is) };
        out += &format!("{what:<12}{is}\n");
    }
    for container in &checkpoint.containers {
        let command = container.args.join(" ");
        out += &render::plain(&format!("\nContainer {} of {}: {command}", container.name, container.image));
    }
    out
}
