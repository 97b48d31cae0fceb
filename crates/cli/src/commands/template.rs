//! `template`: frozen VMs of which pods' VMs are copies.

use std::time::Duration;

use anyhow::bail;
use clap::Subcommand;
use indicatif::ProgressBar;
use sandboxer_probe::document::Table;
use sandboxer_protocol::admin::{
    BuildTemplateRequest, ListTemplatesRequest, ListTemplatesResponse, RemoveTemplateRequest, Template,
    VerifyTemplateRequest,
};

use crate::{Global, client, client::ClientError, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli template list
  sandboxer-cli template build --memory 512
  sandboxer-cli template verify                 all of them; exit code 1 if one is damaged
  sandboxer-cli template rm cac81d

A pod's VM is taken from the pool, else it is a copy of a template, else it boots. The daemon makes
templates on its own when pods of a size start; `build` makes one before the first such pod.";

/// Manage templates (frozen VMs that are copied for pods), and show the pool
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List templates on disk, VMs in the pool, and the start paths of pods
    #[command(visible_alias = "ls")]
    List,
    /// Make a template of a size, unless there is one
    Build {
        /// Virtual CPUs [default: as for a pod without limits]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        vcpus: Option<u32>,
        /// Memory, MiB [default: as for a pod without limits]
        #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(64..))]
        memory: Option<u64>,
        /// VMM: qemu, cloud-hypervisor or firecracker [default: the configured one]
        #[arg(long, value_name = "NAME")]
        vmm: Option<String>,
    },
    /// Verify the checksums of templates
    Verify {
        /// Prefix of a template's key [default: all templates]
        #[arg(value_name = "KEY")]
        key: Option<String>,
    },
    /// Remove templates; pods that were copied from them keep running
    Rm {
        /// Prefixes of templates' keys
        #[arg(value_name = "KEY", required = true)]
        keys: Vec<String>,
    },
}

/// Runs the subcommand.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let mut daemon = client::connect(&global.socket).await?;
    match args.verb {
        Verb::List => {
            let answer = client::answer(daemon.list_templates(ListTemplatesRequest {}).await)?;
            if global.json { render::print_json(&answer) } else { Ok(render::print(&text(&answer))?) }
        }
        Verb::Build { vcpus, memory, vmm } => {
            let request = BuildTemplateRequest {
                vcpus: vcpus.unwrap_or(0),
                memory_mib: memory.unwrap_or(0),
                vmm: vmm.unwrap_or_default(),
            };
            let waiting = ProgressBar::new_spinner().with_message("booting a VM and freezing it");
            waiting.enable_steady_tick(Duration::from_millis(100));
            let mut answers = client::answer(daemon.build_template(request).await)?;
            let built = answers.message().await.map_err(ClientError::from)?;
            waiting.finish_and_clear();
            let Some(built) = built else { bail!("the daemon ended before the template was made") };
            show(&[built], global)
        }
        Verb::Verify { key } => {
            let keys = match key {
                Some(key) => vec![key],
                None => {
                    let listed = client::answer(daemon.list_templates(ListTemplatesRequest {}).await)?;
                    listed.templates.into_iter().map(|template| template.key).collect()
                }
            };
            let mut checked = Vec::new();
            for key in keys {
                checked.push(client::answer(daemon.verify_template(VerifyTemplateRequest { key }).await)?);
            }
            show(&checked, global)?;
            match checked.iter().filter(|template| !template.problem.is_empty()).count() {
                0 => Ok(()),
                damaged => bail!("{damaged} of {} templates cannot be used", checked.len()),
            }
        }
        Verb::Rm { keys } => {
            let mut removed = Vec::new();
            for key in keys {
                removed.push(client::answer(daemon.remove_template(RemoveTemplateRequest { key }).await)?);
            }
            show(&removed, global)
        }
    }
}

fn show(templates: &[Template], global: &Global) -> anyhow::Result<()> {
    if global.json { render::print_json(&templates) } else { Ok(render::print(&table(templates))?) }
}

fn text(answer: &ListTemplatesResponse) -> String {
    let mut out =
        if answer.templates.is_empty() { "no templates".to_owned() } else { table(&answer.templates) };
    out += &format!("\n\n{} VMs are in the pool", answer.pool.len());
    if !answer.start_paths.is_empty() {
        let mut rows = Table::new(1, ["START PATH", "PODS", "FELL BACK", "BECAUSE"]).with_text("BECAUSE");
        for count in &answer.start_paths {
            let (taken, missed) = match count.reason.as_str() {
                "" => (count.pods.to_string(), String::new()),
                reason => (String::new(), format!("{} × {}", count.pods, render::plain(reason))),
            };
            let because = because(&count.start_path, &count.reason);
            rows.row([render::plain(&count.start_path), taken, missed, because.into()]);
        }
        out += &format!("\n\n{rows}");
    }
    out
}

/// Returns what a reason means for pods that miss a start path, and what helps.
fn because(start_path: &str, reason: &str) -> &'static str {
    match (start_path, reason) {
        ("pool", "empty") => "all VMs were taken: a larger [pool] min helps",
        ("pool", "other-size" | "interfaces" | "other-vmm") => {
            "no VM of this kind waits: [pool] max above min leaves room for some"
        }
        ("pool", "huge-pages") => "the pod's memory is in huge pages, and that of copies is not",
        (_, "preparing") => "its template was not ready yet",
        (_, "off") => "turned off by the configuration",
        (_, "stale" | "damaged" | "refused") => {
            "its template cannot be used any more: a new one is being made"
        }
        (_, "no-room") => "templates in use leave no room: [templates] max or max_mib",
        (_, "not-made") => "its template could not be made: the daemon's log says why",
        (_, "silent" | "ended" | "claim-failed" | "restore-failed" | "failed") => {
            "a VM failed, and the pod got another one: the daemon's log says why"
        }
        _ => "",
    }
}

fn table(templates: &[Template]) -> String {
    let header = ["KEY", "VCPUS", "MEMORY", "STORED", "AGE", "VMM", "STATE"];
    render::table(header, templates.iter().map(row))
}

fn row(template: &Template) -> Vec<String> {
    let state = match (template.problem.as_str(), template.in_use) {
        ("", true) => "in use".to_owned(),
        ("", false) => "on disk".to_owned(),
        (problem, _) => render::plain(problem),
    };
    let vmm = format!("{} {} {}", template.vmm, first_word(&template.vmm_version), template.accelerator);
    vec![
        render::short(&template.key),
        template.vcpus.to_string(),
        render::mib(template.memory_mib),
        render::mib(template.stored_bytes.div_ceil(1 << 20)),
        if template.made_at_ns == 0 { "-".into() } else { render::age(template.made_at_ns) },
        render::plain(vmm.trim()),
        state,
    ]
}

fn first_word(text: &str) -> &str {
    text.split_ascii_whitespace().next().unwrap_or_default()
}
