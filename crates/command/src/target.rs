//! Options that measuring commands share.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::Result;
use sandboxer_probe::{
    clock::Clock,
    measure::{self, Bench},
    options::Network,
    timeline::Recipe,
};

use crate::Global;

/// Where pods are started, and their properties.
#[derive(Debug, Clone, clap::Args)]
pub struct Target {
    /// CRI endpoint of the container runtime
    #[arg(
        long,
        env = "CONTAINER_RUNTIME_ENDPOINT",
        default_value = "unix:///run/containerd/containerd.sock"
    )]
    pub endpoint: String,
    /// Image of the containers; it must be on the node
    #[arg(long, default_value = "docker.io/library/busybox:latest")]
    pub image: String,
    /// Command of the containers; it must print at once and keep running
    #[arg(long, num_args = 1.., allow_hyphen_values = true, value_terminator = ";")]
    pub command: Vec<String>,
    /// Network of the pods: pod (a namespace each, set up by CNI) or host (the node's: no namespace, no CNI)
    #[arg(long, default_value_t)]
    pub network: Network,
    /// Annotation of the pods, KEY=VALUE
    #[arg(long = "annotation", value_parser = key_value)]
    pub annotations: Vec<(String, String)>,
    /// Parent of the pods' cgroups
    #[arg(long, env = "SANDBOXER_CGROUP_PARENT", default_value = "")]
    pub cgroup_parent: String,
    /// Seconds after which a start counts as failed
    #[arg(long, default_value_t = 60.0, value_parser = seconds)]
    pub timeout: f64,
    /// Clock of this host's times: wall or virtual [default: from the kernel's command line, else wall]
    #[arg(long, env = "SANDBOXER_CLOCK")]
    pub clock: Option<Clock>,
}

impl Target {
    /// Connects lazily, and prepares to watch logs. The daemon's socket, if there is one, supplies the stages of a
    /// start.
    pub fn open(&self, global: &Global) -> Result<Bench> {
        let admin = global.socket.exists().then_some(global.socket.as_path());
        let mut bench = Bench::open(&self.endpoint, admin)?;
        bench.clock = self.clock.unwrap_or(bench.clock);
        Ok(bench)
    }

    /// Returns the recipe of the pods.
    pub fn recipe(&self) -> Recipe {
        let mut recipe = measure::recipe(&self.image, self.network, Duration::from_secs_f64(self.timeout));
        if !self.command.is_empty() {
            recipe.command = self.command.clone();
        }
        recipe.cgroup_parent = self.cgroup_parent.clone();
        recipe.annotations = self.annotations.iter().cloned().collect::<HashMap<_, _>>();
        recipe
    }
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("'{text}' is not KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds > 0.0 && seconds < 86_400.0 => Ok(seconds),
        _ => Err(format!("'{text}' is not a number of seconds above 0")),
    }
}
