//! The container runtime that benches use: the environment's, or a stack that they start.

use std::path::{Path, PathBuf};
use std::process::Command;

use sandboxer_probe::{
    measure::{self, Bench},
    options::Network,
    timeline::Recipe,
};

/// Handlers to compare, as far as they exist.
pub const HANDLERS: [&str; 4] = ["sandboxer", "sandboxer-template", "sandboxer-boot", "runc"];
const IMAGE: &str = "docker.io/library/busybox:latest";

/// A runtime to measure. Dropping it stops a stack that was started for it.
pub struct Stack {
    /// The measuring environment, connected to the runtime.
    pub bench: Bench,
    /// Handlers that exist.
    pub handlers: Vec<String>,
    own: Option<PathBuf>,
    cgroup_parent: String,
}

impl Stack {
    /// Finds or starts a runtime. Returns as an error why there is nothing to measure.
    pub fn find(runtime: &tokio::runtime::Runtime) -> Result<Self, String> {
        let own = match std::env::var("CONTAINER_RUNTIME_ENDPOINT") {
            Ok(_) => None,
            Err(_) => Some(start()?),
        };
        let variable = |name: &str| match &own {
            None => std::env::var(name).ok(),
            Some(dir) => {
                let env = std::fs::read_to_string(dir.join("env")).unwrap_or_default();
                let line = env.lines().find_map(|line| line.strip_prefix(&format!("export {name}=")))?;
                Some(line.to_owned())
            }
        };
        let endpoint = variable("CONTAINER_RUNTIME_ENDPOINT").ok_or("the stack names no endpoint")?;
        let admin = variable("SANDBOXER_SOCKET").map(PathBuf::from).filter(|path| path.exists());
        let cgroup_parent = variable("SANDBOXER_CGROUP_PARENT").unwrap_or_default();
        let mut stack = Self {
            bench: {
                let _inside = runtime.enter();
                Bench::open(&endpoint, admin.as_deref()).map_err(|error| sandboxer_base::chain(&error))?
            },
            handlers: Vec::new(),
            own,
            cgroup_parent,
        };
        let (known, _) =
            runtime.block_on(stack.bench.runtime.describe()).map_err(|error| error.to_string())?;
        stack.handlers = HANDLERS
            .iter()
            .filter(|name| known.iter().any(|k| k == *name))
            .map(|&name| name.to_owned())
            .collect();
        Ok(stack)
    }

    /// Returns the recipe of the pods.
    pub fn recipe(&self) -> Recipe {
        let mut recipe = measure::recipe(IMAGE, Network::Pod, std::time::Duration::from_secs(120));
        recipe.cgroup_parent = self.cgroup_parent.clone();
        recipe
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        if let Some(dir) = &self.own
            && let Err(why) = script("down", dir)
        {
            eprintln!("the stack in {} may still be there: {why}", dir.display());
        }
    }
}

fn root() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir).to_owned()
}

fn start() -> Result<PathBuf, String> {
    let dir = root().join("target/bench-stack");
    if let Err(why) = script("up", &dir) {
        // Also removes what had started before the failure.
        let _ = script("down", &dir);
        return Err(why);
    }
    dir.canonicalize().map_err(|error| error.to_string())
}

fn script(verb: &str, dir: &Path) -> Result<(), String> {
    let output = Command::new(root().join("scripts/stack.sh"))
        .arg(verb)
        .arg(dir)
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

/// Returns a fresh directory below `target/criterion` for a result.
pub fn result_dir(name: &str) -> PathBuf {
    let at = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ");
    root().join(format!("target/criterion/{name}-{at}"))
}
