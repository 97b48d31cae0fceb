//! `version`: versions of this program, the daemon, the VMM and the guest.

use sandboxer_protocol::{PROTOCOL_VERSION, admin::VersionResponse};
use serde::Serialize;

use crate::{Global, client, render};

const EXAMPLES: &str = "\
Examples:
  sandboxer-cli version
  sandboxer-cli version --client              without a daemon
  sandboxer-cli version --json | jq -r .daemon.accelerator";

/// Show versions, and which VMM and accelerator pods get
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print only this program's version; needs no daemon
    #[arg(long)]
    client: bool,
}

#[derive(Debug, Serialize)]
struct Versions {
    client: Client,
    #[serde(skip_serializing_if = "Option::is_none")]
    daemon: Option<VersionResponse>,
}

#[derive(Debug, Serialize)]
struct Client {
    version: &'static str,
    protocol_version: u32,
}

/// Prints the versions.
pub async fn run(args: Args, global: &Global) -> anyhow::Result<()> {
    let client = Client { version: env!("CARGO_PKG_VERSION"), protocol_version: PROTOCOL_VERSION };
    let response = if args.client { Ok(None) } else { client::version(&global.socket).await.map(Some) };
    let (daemon, failed) = match response {
        Ok(daemon) => (daemon, None),
        // This program's version is printed even without a daemon.
        Err(error) => (None, Some(error)),
    };
    let versions = Versions { client, daemon };
    if global.json {
        render::print_json(&versions)?;
    } else {
        render::print(&text(&versions))?;
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}

fn text(versions: &Versions) -> String {
    let line = |name: &str, value: &str| format!("{name:<13}{}\n", render::plain(value));
    let release = |version: &str, protocol: u32| format!("{version} (protocol {protocol})");
    let mut out = line(
        "sandboxer-cli",
        &format!(" {}", release(versions.client.version, versions.client.protocol_version)),
    );
    if let Some(daemon) = &versions.daemon {
        out += &line("sandboxer", &format!(" {}", release(&daemon.version, daemon.protocol_version)));
        if daemon.keeper_pid != 0 {
            out += &line("  keeper", &format!(" {}", daemon.keeper_pid));
        }
        out += &line("  front", &format!(" {}", daemon.front_pid));
        out +=
            &line("  worker", &format!(" {}, up {}", daemon.worker_pid, render::age(daemon.started_at_ns)));
        out += &line("  recovered", &format!(" {} pods", daemon.recovered_pods));
        out += &line("  vmm", &format!(" {} {}", daemon.vmm, daemon.vmm_version));
        if !daemon.handlers_vmms.is_empty() {
            out += &line("  handlers", &format!(" {}", daemon.handlers_vmms.join(", ")));
        }
        out += &line("  accel", &format!(" {}: {}", daemon.accelerator, daemon.accelerator_reason));
        out += &line("  kernel", &format!(" {}", daemon.kernel));
        out += &line("  initramfs", &format!(" {}", daemon.initramfs));
    }
    out.trim_end().to_owned()
}
