//! The plan of a measurement, and the commands of its runs.

use std::path::PathBuf;
use std::time::Duration;

use sandboxer_probe::native::NATIVE;
use sandboxer_probe::timeline::Recipe;
use sandboxer_probe::vm::{VM, Vm, VmError};
use sandboxer_probe::workload::definition::{Probe, Profile, Storage, Values};
use sandboxer_probe::workload::run::{Commands, handler};

use super::native::Native;
use super::power::Meter;

/// Factor between a tool's expected time and its timeout: tools take longer, mostly under emulation.
const SLOWER: u32 = 4;
/// Helper that prints the container's facts, then executes the tool.
const HELPER: &str = "bench-helper";

/// Plan of a measurement.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Series, in the order in which they alternate: handlers, `native` or `vm`. "runc#2" is a second series of the
    /// handler runc.
    pub runtimes: Vec<String>,
    /// Environment of tools of the series native.
    pub native: Option<Native>,
    /// Configuration of the VMs of the series `vm`.
    pub vm: Option<Vm>,
    /// Handler of the clients' pods.
    pub client_runtime: String,
    /// Probes to measure.
    pub probes: Vec<Probe>,
    /// Parameters of the probes.
    pub profile: Profile,
    /// Counted rounds: in each, every runtime runs every variant once.
    pub repeat: u32,
    /// Warm-up rounds: in each, every runtime runs the first variant of each probe.
    pub warm_up: u32,
    /// Number of processors of each pod.
    pub cpus: u32,
    /// Memory of each pod, bytes.
    pub memory: u64,
    /// Host directory of volumes: probes measure its disk.
    pub volumes: PathBuf,
    /// Handlers whose containers do not show their limits; the plan's limits are assumed for them.
    pub trusted: Vec<String>,
    /// Recipe of the pods. Its timeout is added to the tool's time.
    pub recipe: Recipe,
    /// Image with compilers and checkers; the recipe names the other tools' image.
    pub build_image: String,
    /// Source of power figures.
    pub meter: Meter,
}

/// A command to run on each runtime: one variant of a probe.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Probe that runs.
    pub probe: Probe,
    /// Name of the variant.
    pub case: String,
    /// Values of the placeholders, except those that only a run has.
    values: Values,
    /// Running time of the tool.
    pub takes: Duration,
}

/// Why a command is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// A placeholder has no value.
    #[error("probe {probe}: '{word}' has a placeholder without a value")]
    Placeholder {
        /// Name of the probe.
        probe: String,
        /// Word of the command that has the placeholder.
        word: String,
    },
}

/// Returns names of series for handlers, which may be named several times: "runc", "runc#2".
pub fn series(handlers: &[String]) -> Vec<String> {
    let name = |(index, handler): (usize, &String)| {
        let before = handlers[..index].iter().filter(|other| *other == handler).count();
        if before == 0 { handler.clone() } else { format!("{handler}#{}", before + 1) }
    };
    handlers.iter().enumerate().map(name).collect()
}

impl Plan {
    /// Returns the runtimes that are CRI handlers.
    pub fn handlers(&self) -> Vec<String> {
        let mut handlers: Vec<String> = Vec::new();
        let cri = |name: &&str| ![NATIVE, VM].contains(name);
        for handler in self.runtimes.iter().map(|series| handler(series)).filter(cri) {
            if !handlers.iter().any(|known| known == handler) {
                handlers.push(handler.to_owned());
            }
        }
        handlers
    }

    /// Returns the runtimes in the order in which a round runs each variant. Each round begins with a different
    /// runtime: the first run of a variant follows another variant, whose files and connections may still be removed,
    /// and later runs follow the same variant.
    pub fn order(&self, round: u32) -> Vec<String> {
        let mut order = self.runtimes.clone();
        let first = round as usize % order.len().max(1);
        order.rotate_left(first);
        order
    }

    /// Returns whether the plan has the series native.
    pub fn has_native(&self) -> bool {
        self.runtimes.iter().any(|series| handler(series) == NATIVE)
    }

    /// Returns the configuration of VMs, if the plan has the series `vm`.
    pub fn vms(&self) -> Result<Option<&Vm>, VmError> {
        if !self.runtimes.iter().any(|series| handler(series) == VM) {
            return Ok(None);
        }
        let vm = self.vm.as_ref().ok_or(VmError::NoImage)?;
        vm.image.check().map(|()| Some(vm))
    }

    /// Returns the variants, in the order in which they run.
    pub fn steps(&self) -> Vec<Step> {
        let steps_of = |probe: &Probe| {
            let parameters = probe.parameters(self.profile);
            let cases = probe.cases(self.profile).map(|case| {
                let mut values = parameters.values.clone();
                values.extend(case.values.clone());
                Step {
                    probe: probe.clone(),
                    case: case.name.clone(),
                    values,
                    takes: Duration::from_secs_f64(parameters.takes.clamp(0.0, 86_400.0)),
                }
            });
            cases.collect::<Vec<_>>()
        };
        self.probes.iter().flat_map(steps_of).collect()
    }

    /// Returns the variants of a warm-up round: the first of each probe.
    pub fn warm_up_steps(&self) -> Vec<Step> {
        let mut steps = self.steps();
        steps.dedup_by(|step, before| step.probe.name == before.probe.name);
        steps
    }

    /// Returns the number of measured containers.
    pub fn runs(&self) -> u64 {
        let runs_in = |rounds: u32, steps: Vec<Step>| u64::from(rounds) * steps.len() as u64;
        (runs_in(self.warm_up, self.warm_up_steps()) + runs_in(self.repeat, self.steps()))
            * self.runtimes.len() as u64
    }

    /// Returns the total running time of the tools, without starting and removing pods.
    pub fn takes(&self) -> Duration {
        let time_of =
            |rounds: u32, steps: Vec<Step>| steps.iter().map(|step| step.takes).sum::<Duration>() * rounds;
        (time_of(self.warm_up, self.warm_up_steps()) + time_of(self.repeat, self.steps()))
            * self.runtimes.len() as u32
    }
}

impl Step {
    /// Returns the name of the step, such as "redis" or "cpu one-thread".
    pub fn name(&self) -> String {
        format!("{} {}", self.probe.name, self.case).trim_end().to_owned()
    }

    /// Returns the time after which a run has failed.
    pub fn deadline(&self, more: Duration) -> Duration {
        self.takes * SLOWER + more
    }

    /// Returns the storage of the tool's files; `None` for a tool without files.
    pub fn storage(&self) -> Option<Storage> {
        Storage::of_name(self.values.get("storage")?)
    }

    /// Returns the size of the tool's files, bytes; 0 if the probe states none.
    pub fn size(&self) -> u64 {
        self.values.get("size").and_then(|size| bytes(size)).unwrap_or_default()
    }

    /// Returns the memory that the pod must have, bytes; 0 if any amount is enough.
    pub fn needs(&self) -> u64 {
        self.values.get("memory").and_then(|memory| bytes(memory)).unwrap_or_default()
    }

    /// Returns the number of threads that this variant runs.
    pub fn threads(&self, effective: u32) -> Option<u32> {
        let asks = self.probe.command.iter().any(|word| word.contains("{threads}"));
        let fixed = || self.values.get("threads").and_then(|threads| threads.parse().ok());
        asks.then(|| fixed().unwrap_or(effective))
    }

    /// Returns the commands with every placeholder filled. `server` is the address of the server's pod, `device` the
    /// path of a block device.
    pub fn commands(&self, threads: u32, server: &str, device: &str) -> Result<Commands, StepError> {
        let mut values = Values::from([
            ("threads".to_owned(), threads.to_string()),
            ("server".to_owned(), server.to_owned()),
        ]);
        let dir = self.storage().and_then(Storage::inside);
        values.extend(dir.map(|dir| ("dir".to_owned(), dir.to_owned())));
        values.extend(
            self.storage().map(|_| {
                ("file".to_owned(), dir.map_or_else(|| device.to_owned(), |dir| format!("{dir}/fio")))
            }),
        );
        values.extend(self.values.clone());
        let fill = |words: &[String]| -> Result<Vec<String>, StepError> {
            let one = |word: &String| {
                filled(word, &values).ok_or_else(|| StepError::Placeholder {
                    probe: self.probe.name.clone(),
                    word: word.clone(),
                })
            };
            words.iter().map(one).collect()
        };
        Ok(Commands { tool: fill(&self.probe.command)?, server: fill(&self.probe.server)? })
    }
}

/// Returns the command of a container: the helper prints the container's facts, then executes `words`. For a server,
/// the helper also reports when `port` is listened on: see [`sandboxer_probe::workload::facts::listens`]. `storage` sets where the command
/// runs.
pub fn inside(words: &[String], port: Option<u16>, storage: Option<Storage>) -> Vec<String> {
    let mut command = vec![HELPER.to_owned(), "run".to_owned()];
    command.extend(storage.and_then(Storage::inside).map(|dir| format!("--in={dir}")));
    command.extend(port.map(|port| format!("--announce={port}")));
    command.push("--".to_owned());
    command.extend(words.iter().cloned());
    command
}

/// Parses a size such as "64M" or "1G" to bytes.
fn bytes(size: &str) -> Option<u64> {
    let (number, shift) = match size.as_bytes().last()? {
        b'K' => (&size[..size.len() - 1], 10),
        b'M' => (&size[..size.len() - 1], 20),
        b'G' => (&size[..size.len() - 1], 30),
        _ => (size, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Fills the placeholders; `None` if one has no value.
fn filled(word: &str, values: &Values) -> Option<String> {
    let (mut text, mut rest) = (String::new(), word);
    while let Some((before, after)) = rest.split_once('{') {
        let (name, end) = after.split_once('}')?;
        text.push_str(before);
        text.push_str(values.get(name)?);
        rest = end;
    }
    text.push_str(rest);
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandboxer_probe::measure::recipe;
    use sandboxer_probe::options::Network;
    use sandboxer_probe::workload::definition;

    fn plan(profile: Profile) -> Plan {
        Plan {
            runtimes: vec!["a".into(), "b".into()],
            native: None,
            vm: None,
            client_runtime: "a".into(),
            probes: definition::all(),
            profile,
            repeat: 3,
            warm_up: 1,
            cpus: 2,
            memory: 512 << 20,
            volumes: std::env::temp_dir(),
            recipe: recipe("image", Network::Pod, Duration::from_secs(60)),
            trusted: Vec::new(),
            build_image: "build".into(),
            meter: Meter::None(String::new()),
        }
    }

    fn step(name: &str) -> Step {
        plan(Profile::Paper).steps().into_iter().find(|step| step.name() == name).unwrap()
    }

    #[test]
    fn every_command_of_every_profile_can_be_filled() {
        for profile in [Profile::Quick, Profile::Paper] {
            for step in plan(profile).steps() {
                let commands = step.commands(2, "10.0.0.1", "/dev/x").unwrap();
                let words = commands.tool.iter().chain(&commands.server);
                assert!(words.clone().all(|word| !word.contains('{')), "{commands:?}");
                assert_eq!(commands.server.is_empty(), step.probe.server.is_empty());
            }
        }
    }

    #[test]
    fn threads_are_those_of_the_smallest_side_unless_a_study_fixes_them() {
        let words = |name: &str| step(name).commands(3, "", "").unwrap().tool.join(" ");
        assert!(words("cpu all-cpus").contains("--threads=3"));
        assert!(words("cpu one-thread").contains("--threads=1 "));
        assert_eq!(step("cpu one-thread").threads(3), Some(1));
        assert_eq!(step("cpu all-cpus").threads(3), Some(3));
        assert_eq!(step("syscalls").threads(3), None);
    }

    #[test]
    fn the_thesis_parameters_are_the_paper_profile() {
        let words = |name: &str| step(name).commands(4, "10.0.0.9", "").unwrap().tool.join(" ");
        assert_eq!(words("cpu one-thread"), "sysbench cpu --cpu-max-prime=10000 --threads=1 --time=10 run");
        assert_eq!(words("jitter 1-mbit"), "iperf3 -c 10.0.0.9 -u -b 1M -l 1448 -t 10 -J");
        assert_eq!(words("http 200-clients"), "ab -r -n 5000 -c 200 http://10.0.0.9:8080/");
    }

    #[test]
    fn files_lie_in_the_storage_that_the_row_names_and_never_in_the_root() {
        for step in plan(Profile::Paper)
            .steps()
            .iter()
            .filter(|step| ["files", "request-sizes"].contains(&&*step.probe.name))
        {
            let storage = step.storage().unwrap();
            let named = step.case.starts_with(&format!("{storage:?}-").to_lowercase());
            assert!(named || step.probe.name == "request-sizes", "{}", step.case);
            let file = match storage.inside() {
                Some(dir) => format!("--filename={dir}/fio"),
                None => "--filename=/dev/x".into(),
            };
            assert!(step.commands(1, "", "/dev/x").unwrap().tool.contains(&file), "{}", step.case);
        }
    }

    #[test]
    fn a_durable_row_writes_past_the_cache_and_waits_for_the_disk() {
        for step in plan(Profile::Quick).steps().iter().filter(|step| step.case.ends_with("-durable")) {
            let words = step.commands(1, "", "/dev/x").unwrap().tool;
            assert!(["--direct=1", "--fsync=1"].iter().all(|word| words.iter().any(|known| known == word)));
        }
    }

    #[test]
    fn a_handler_that_is_named_twice_is_two_series() {
        let names = ["runc", "sandboxer", "runc", "runc"].map(str::to_owned);
        assert_eq!(series(&names), ["runc", "sandboxer", "runc#2", "runc#3"]);
        let plan = Plan { runtimes: series(&names), ..plan(Profile::Quick) };
        assert_eq!(plan.handlers(), ["runc", "sandboxer"]);
        assert!(!plan.has_native() && Plan { runtimes: series(&["native".into()]), ..plan }.has_native());
    }

    #[test]
    fn each_round_begins_with_the_next_runtime() {
        let plan = Plan { runtimes: ["a", "b", "c"].map(str::to_owned).into(), ..plan(Profile::Quick) };
        let orders = [0, 1, 2, 3].map(|round| plan.order(round).concat());
        assert_eq!(orders, ["abc", "bca", "cab", "abc"]);
        assert_eq!(Plan { runtimes: Vec::new(), ..plan }.order(1), Vec::<String>::new());
    }

    #[test]
    fn sizes_are_bytes() {
        assert_eq!(
            ["64M", "1G", "4096", "2K"].map(bytes),
            [Some(64 << 20), Some(1 << 30), Some(4096), Some(2048)]
        );
        assert_eq!(["", "M", "1T", "x"].map(bytes), [None; 4]);
    }

    #[test]
    fn placeholders_without_a_value_are_named() {
        assert_eq!(filled("--a={b}-{c}", &Values::from([("b".into(), "1".into())])), None);
        assert_eq!(filled("{", &Values::new()), None);
        assert_eq!(filled("plain", &Values::new()).as_deref(), Some("plain"));
    }

    #[test]
    fn the_helper_stands_before_every_tool() {
        let tool = ["tool".to_owned(), "-x".to_owned()];
        assert_eq!(inside(&tool, None, None), ["bench-helper", "run", "--", "tool", "-x"]);
        assert_eq!(
            inside(&tool, Some(80), Some(Storage::EmptyDir)),
            ["bench-helper", "run", "--in=/data", "--announce=80", "--", "tool", "-x"]
        );
    }

    #[test]
    fn rounds_count_for_every_runtime_and_variant() {
        let plan = plan(Profile::Quick);
        let first = plan.warm_up_steps();
        assert_eq!(first.len(), plan.probes.len());
        assert_eq!(plan.runs(), 2 * (3 * plan.steps().len() + first.len()) as u64);
        assert!(plan.takes() > Duration::from_secs(60));
    }
}
