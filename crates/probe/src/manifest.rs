//! Conditions of a result. An unknown fact states the reason.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::runtime::Runtime;
use crate::sides;
use crate::timeline::Recipe;
use crate::trace::Trace;
use crate::vm::VM;
use crate::workload;

/// Facts by name. An unknown fact is `{"not_measured": "why"}`.
pub type Facts = BTreeMap<String, Value>;

/// All conditions of a run, in groups.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Time at which the run began, RFC 3339.
    pub at: String,
    /// Version of the probe.
    pub probe: String,
    /// Facts of the host and its kernel.
    pub host: Facts,
    /// Facts of the CRI runtime.
    pub cri: Facts,
    /// Facts per handler: type, snapshotter, options; for VMs also vCPUs, memory and the guest's kernel.
    pub runtimes: BTreeMap<String, Facts>,
    /// Facts of the VMM and the guest, if the daemon reports them.
    pub vmm: Facts,
    /// Facts of the pods.
    pub pod: Facts,
    /// Facts of the plan.
    pub plan: Facts,
}

/// Returns the value of an unknown fact, with the reason.
pub fn not_measured(why: impl Into<String>) -> Value {
    json!({ "not_measured": why.into() })
}

/// Returns a fact as text; an unknown one with its reason.
pub fn shown(fact: &Value) -> String {
    match fact {
        Value::String(text) => text.clone(),
        Value::Object(object) => match object.get("not_measured") {
            Some(Value::String(why)) => format!("not measured: {why}"),
            _ => fact.to_string(),
        },
        other => other.to_string(),
    }
}

impl Manifest {
    /// Reads the conditions of this host, this runtime and these handlers; adds `plan` unchanged.
    pub async fn take(
        runtime: &Runtime,
        trace: Option<&Trace>,
        handlers: &[String],
        recipe: &Recipe,
        plan: Facts,
    ) -> Self {
        let (cri, runtimes) = cri_facts(runtime, handlers).await;
        Self {
            at: jiff::Timestamp::now().to_string(),
            probe: env!("CARGO_PKG_VERSION").to_owned(),
            host: host_facts(cri.get("root").and_then(Value::as_str).map(Path::new)),
            cri,
            runtimes,
            vmm: vmm_facts(trace).await,
            pod: pod_facts(runtime, recipe).await,
            plan,
        }
    }

    /// Adds properties of these handlers' VMs, which are known after the first pod.
    pub fn add_vms(&mut self, vms: BTreeMap<String, Facts>) {
        for (handler, vm) in vms {
            self.runtimes.entry(handler).or_default().extend(vm);
        }
    }

    /// Returns whether the plans show that the starts of two runtimes are from the same runs.
    pub fn measured_together(&self, a: &str, b: &str) -> bool {
        let has = |plan: &Value| {
            let runtimes = plan.get("runtimes")?.as_array()?;
            Some([a, b].map(|name| runtimes.iter().any(|runtime| runtime == name)))
        };
        let whole = json!(self.plan);
        std::iter::once(&whole).chain(self.plan.values()).filter_map(has).all(|[a, b]| a == b)
    }

    /// Returns whether the pods of a handler or series are guests that a VMM emulates without KVM.
    pub fn is_emulated(&self, handler: &str) -> bool {
        let has = |facts: &Facts, name: &str, matches: &dyn Fn(&str) -> bool| {
            facts.get(name).and_then(Value::as_str).is_some_and(matches)
        };
        let ours = |facts: &Facts| has(facts, "type", &|name| name.contains("sandboxer"));
        let handler = workload::run::handler(handler);
        if handler == VM {
            let emulated = |facts| has(facts, "accelerator", &|name| name == "tcg");
            return self.runtimes.get(VM).is_some_and(emulated);
        }
        has(&self.vmm, "accelerator", &|name| name == "tcg") && self.runtimes.get(handler).is_some_and(ours)
    }

    /// Returns the load average over one minute before the run, per CPU.
    pub fn load_per_cpu(&self) -> Option<f64> {
        let load = self.host.get("load_average_before")?.get(0)?.as_f64()?;
        Some(load / self.host.get("cpus")?.as_f64()?)
    }
}

fn text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Returns the text of a kernel file, or which file is missing.
fn text_fact(path: &str) -> Value {
    text(path).map_or_else(|| not_measured(format!("cannot read {path}")), Value::from)
}

fn host_facts(root: Option<&Path>) -> Facts {
    let cpuinfo = text("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let count = |dir: &str, prefix: &str| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter(|entry| is_numbered(&entry.file_name().to_string_lossy(), prefix)).count()
    };
    let memory = text("/proc/meminfo").and_then(|memory| {
        memory
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))?
            .trim()
            .split(' ')
            .next()?
            .parse::<u64>()
            .ok()
    });
    let load: Option<Vec<f64>> = text("/proc/loadavg")
        .map(|load| load.split(' ').take(3).filter_map(|average| average.parse().ok()).collect());
    let nodes = count("/sys/devices/system/node", "node");
    let unknown = |what: &str| not_measured(format!("the kernel does not report {what}"));
    Facts::from([
        ("cpu".into(), field("model name").map_or_else(|| unknown("the CPU's model"), Value::from)),
        ("cpus".into(), std::thread::available_parallelism().map_or(Value::Null, |n| json!(n.get()))),
        (
            "virtual_machine".into(),
            json!(field("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"))),
        ),
        ("smt".into(), text_fact("/sys/devices/system/cpu/smt/control")),
        ("numa_nodes".into(), if nodes == 0 { unknown("NUMA nodes") } else { json!(nodes) }),
        ("memory_kib".into(), memory.map_or_else(|| unknown("its memory"), Value::from)),
        ("kernel".into(), text_fact("/proc/sys/kernel/osrelease")),
        ("governor".into(), text_fact("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        ("load_average_before".into(), load.map_or_else(|| unknown("its load"), Value::from)),
        (
            "cgroups".into(),
            json!(if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() { "v2" } else { "v1" }),
        ),
        ("storage".into(), root.map_or_else(|| unknown("the runtime's root"), storage)),
        ("nic_offloads".into(), not_measured("no figure of this run uses a NIC")),
    ])
}

fn is_numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix)
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

/// Returns the file system and block device of a path.
pub fn storage(path: &Path) -> Value {
    let mounts = text("/proc/self/mounts").unwrap_or_default();
    let mount = mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            Some((words.next()?, words.next()?, words.next()?))
        })
        .filter(|(_, point, _)| path.starts_with(point))
        .max_by_key(|(_, point, _)| point.len());
    let Some((device, _, kind)) = mount else { return not_measured("no mount contains the runtime's root") };
    let name = device.rsplit('/').next().unwrap_or_default();
    let queue = PathBuf::from("/sys/class/block").join(name).join("queue");
    json!({
        "file_system": kind,
        "device": device,
        "rotational": text(queue.join("rotational")).map(|flag| flag == "1"),
        "scheduler": text(queue.join("scheduler")),
    })
}

async fn cri_facts(runtime: &Runtime, handlers: &[String]) -> (Facts, BTreeMap<String, Facts>) {
    let mut facts = Facts::from([("endpoint".into(), json!(runtime.socket()))]);
    match runtime.version().await {
        Ok(version) => {
            facts.insert("name".into(), version.name.into());
            facts.insert("version".into(), version.version.into());
        }
        Err(error) => drop(facts.insert("version".into(), not_measured(error.to_string()))),
    }
    let info = runtime.describe().await.map(|(_, info)| info).unwrap_or_default();
    let config = parsed(&info, "config");
    if let Some(root) = config.get("containerdRootDir") {
        facts.insert("root".into(), root.clone());
    }
    let runtimes =
        handlers.iter().map(|handler| (handler.clone(), handler_facts(&config, handler))).collect();
    (facts, runtimes)
}

fn parsed(info: &HashMap<String, String>, name: &str) -> Value {
    info.get(name).and_then(|text| serde_json::from_str(text).ok()).unwrap_or(Value::Null)
}

fn handler_facts(config: &Value, handler: &str) -> Facts {
    let reported = &config["containerd"]["runtimes"][handler];
    let fact = |name: &str| match &reported[name] {
        Value::Null => not_measured("the CRI runtime does not report it"),
        value => value.clone(),
    };
    let snapshotter = match reported["snapshotter"].as_str() {
        None | Some("") => fact("snapshotter"),
        Some(name) => json!(name),
    };
    let mut facts = Facts::from([
        ("type".into(), fact("runtimeType")),
        ("sandboxer".into(), fact("sandboxer")),
        ("snapshotter".into(), snapshotter),
        ("options".into(), reported["options"].clone()),
    ]);
    // Two handlers of one type may each have their own shim.
    if let Some(path) = reported["runtimePath"].as_str().filter(|path| !path.is_empty()) {
        facts.insert("shim".into(), json!(path));
        facts.insert("shim_sha256".into(), digest(Path::new(path)));
    }
    facts.extend(
        sides::configuration(&reported["options"])
            .map(|configuration| ("configuration".to_owned(), configuration)),
    );
    facts
}

async fn vmm_facts(trace: Option<&Trace>) -> Facts {
    let Some(trace) = trace else {
        return Facts::from([("vmm".into(), not_measured("no daemon's admin socket was given"))]);
    };
    let version = match trace.version().await {
        Ok(version) => version,
        Err(error) => {
            let why = format!("no daemon answers at {}: {}", trace.socket().display(), error.message());
            return Facts::from([("vmm".into(), not_measured(why))]);
        }
    };
    Facts::from([
        ("daemon".into(), version.version.into()),
        ("vmm".into(), version.vmm.into()),
        ("vmm_version".into(), version.vmm_version.into()),
        ("accelerator".into(), version.accelerator.into()),
        ("accelerator_reason".into(), version.accelerator_reason.into()),
        ("kernel_sha256".into(), digest(Path::new(&version.kernel))),
        ("kernel".into(), version.kernel.into()),
        ("initramfs_sha256".into(), digest(Path::new(&version.initramfs))),
        ("initramfs".into(), version.initramfs.into()),
    ])
}

/// Returns the SHA-256 of a file, or why it is unknown.
pub(crate) fn digest(path: &Path) -> Value {
    let hash = || {
        let mut hash = Sha256::new();
        std::io::copy(&mut fs::File::open(path)?, &mut HashWriter(&mut hash))?;
        Ok::<_, std::io::Error>(hash.finalize())
    };
    match hash() {
        Ok(hash) => json!(hash.iter().map(|byte| format!("{byte:02x}")).collect::<String>()),
        Err(error) => not_measured(format!("cannot read {}: {error}", path.display())),
    }
}

struct HashWriter<'a>(&'a mut Sha256);

impl std::io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

async fn pod_facts(runtime: &Runtime, recipe: &Recipe) -> Facts {
    let image = match runtime.image(&recipe.image).await {
        Ok(Some(image)) => json!({ "id": image.id, "digests": image.digests, "bytes": image.size }),
        Ok(None) => not_measured("the image is not on the node"),
        Err(error) => not_measured(error.to_string()),
    };
    Facts::from([
        ("image".into(), json!(recipe.image)),
        ("image_digest".into(), image),
        ("command".into(), json!(recipe.command)),
        ("network_asked_for".into(), json!(recipe.network)),
        ("annotations".into(), json!(recipe.annotations)),
        ("timeout_s".into(), json!(recipe.timeout.as_secs_f64())),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_describes_itself() {
        let facts = host_facts(Some(Path::new("/")));
        let manifest = Manifest { host: facts.clone(), ..Manifest::default() };
        assert!(facts["cpus"].as_u64().unwrap() > 0);
        assert!(manifest.load_per_cpu().is_some());
        for (name, fact) in &facts {
            assert!(!fact.is_null(), "{name} is absent instead of 'not measured'");
        }
    }

    #[test]
    fn runtimes_of_different_runs_are_known_by_their_plans() {
        let plan = |runtimes: &[&str]| json!({ "runtimes": runtimes });
        let manifest =
            |plan: Value| Manifest { plan: serde_json::from_value(plan).unwrap(), ..Manifest::default() };
        assert!(manifest(plan(&["a", "b", "runc"])).measured_together("a", "runc"));
        let parts = json!({ "p.1": plan(&["a", "runc"]), "p.2": plan(&["a", "runc"]) });
        assert!(manifest(parts).measured_together("a", "runc"));
        let merged = manifest(json!({ "one": plan(&["a", "runc"]), "two": plan(&["b", "runc"]) }));
        assert!(!merged.measured_together("a", "b") && !merged.measured_together("a", "runc"));
    }

    #[test]
    fn unknown_facts_say_why() {
        assert_eq!(shown(&not_measured("no such file")), "not measured: no such file");
        assert_eq!(shown(&json!("text")), "text");
        assert_eq!(shown(&json!(3)), "3");
    }
}
