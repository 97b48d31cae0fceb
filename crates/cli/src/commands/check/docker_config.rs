//! The settings that docker's daemon needs.

use std::path::Path;

use anyhow::Context;
use sandboxer_config::Config;
use sandboxer_doctor::{containerd::RUNTIME_TYPE, cri::HANDLER};
use serde_json::{Value, json};

use super::Args;
use crate::render;

/// The file of docker's daemon.
const FILE: &str = "/etc/docker/daemon.json";

/// Prints the settings.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    // A mistake in it would be told at each container.
    Config::load_or_default(args.config.as_deref())?;
    // The launcher runs in another directory.
    let own = args.config.as_deref().map(std::path::absolute).transpose();
    let own = own.with_context(|| format!("cannot find {:?}", args.config))?;
    render::print(&serde_json::to_string_pretty(&settings(own.as_deref()))?)?;
    eprintln!(
        "save it as {FILE}, or merge it into that, and restart docker: `docker run --runtime {HANDLER} …`"
    );
    Ok(())
}

/// Returns the settings. `config` is the path of the daemon's configuration; `None`: the default one.
fn settings(config: Option<&Path>) -> Value {
    let mut runtime = json!({"runtimeType": RUNTIME_TYPE});
    if let Some(config) = config {
        runtime["options"] = json!({"ConfigPath": config});
    }
    json!({"runtimes": {HANDLER: runtime}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docker_learns_of_the_runtime_and_of_a_configuration_elsewhere() {
        let runtime = |config: Option<&Path>| settings(config)["runtimes"]["sandboxer"].clone();
        assert_eq!(runtime(None), json!({"runtimeType": "io.containerd.sandboxer.v1"}));
        let elsewhere = runtime(Some("/srv/sandboxer.toml".as_ref()));
        assert_eq!(elsewhere["options"], json!({"ConfigPath": "/srv/sandboxer.toml"}));
    }
}
