//! `checkpoint`: pods that are saved while they run.

use std::time::Duration;

use anyhow::bail;
use clap::Subcommand;
use indicatif::ProgressBar;
use sandboxer_protocol::admin::{
    Checkpoint, CreateCheckpointRequest, InspectCheckpointRequest, ListCheckpointsRequest,
    RemoveCheckpointRequest,
};

use crate::{Global, client, client::ClientError, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli checkpoint create 3f2a warm         save a running pod, which goes on
  sandboxer-cli checkpoint list
  sandboxer-cli checkpoint inspect -n shop warm     show it, and verify its checksums
  sandboxer-cli checkpoint remove -n shop warm

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
    /// Save a running pod; it is paused meanwhile, and goes on
    Create {
        /// Pod id, or a unique prefix of it
        #[arg(value_name = "POD", value_parser = clap::builder::NonEmptyStringValueParser::new())]
        pod: String,
        /// Name of the checkpoint, in the pod's namespace
        #[arg(value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
        name: String,
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
}

/// Runs the subcommand.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let mut daemon = client::connect(&global.socket).await?;
    match args.verb {
        Verb::Create { pod, name } => {
            let waiting = ProgressBar::new_spinner().with_message("saving the pod");
            waiting.enable_steady_tick(Duration::from_millis(100));
            let answers = daemon.create_checkpoint(CreateCheckpointRequest { pod, name }).await;
            let made = answers.map_err(ClientError::from)?.into_inner().message().await;
            waiting.finish_and_clear();
            let Some(made) = made.map_err(ClientError::from)? else {
                bail!("the daemon ended before the pod was saved")
            };
            show(&[made], global)
        }
        Verb::List => {
            let answer =
                daemon.list_checkpoints(ListCheckpointsRequest {}).await.map_err(ClientError::from)?;
            show(&answer.into_inner().checkpoints, global)
        }
        Verb::Inspect { name, namespace } => {
            let answer = daemon.inspect_checkpoint(InspectCheckpointRequest { namespace, name }).await;
            let found = answer.map_err(ClientError::from)?.into_inner();
            if global.json {
                render::print_json(&found)?;
            } else if found.problem.is_empty() {
                render::print(&whole(&found))?;
            }
            match found.problem.as_str() {
                "" => Ok(()),
                problem => bail!(
                    "checkpoint {} cannot be used: {}",
                    render::plain(&found.name),
                    render::plain(problem)
                ),
            }
        }
        Verb::Remove { names, namespace } => {
            let mut removed = Vec::new();
            for name in names {
                let request = RemoveCheckpointRequest { namespace: namespace.clone(), name };
                let answer = daemon.remove_checkpoint(request).await;
                removed.push(answer.map_err(ClientError::from)?.into_inner());
            }
            show(&removed, global)
        }
    }
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
