//! Merges several runs into one result, for example runs with different VMMs or long group runs. Each ratio stays
//! within one run.

use std::collections::{BTreeMap, BTreeSet};

use sandboxer_probe::clock::Clock;
use sandboxer_probe::compare::{SAME_HOST, SAME_POD, SAME_VMM, facts};
use sandboxer_probe::manifest::{Manifest, shown};
use sandboxer_probe::rate::Rate;
use sandboxer_probe::report::{REFERENCE, Report};
use sandboxer_probe::sample::{Mode, Sample};
use sandboxer_probe::startup::{Batch, batches_of};
use sandboxer_probe::store::Loaded;
use serde_json::json;

/// Why results cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// The clocks of two results differ.
    #[error("{a} has {} and {b} has {}: one result cannot have times of two clocks", clocks[0].ms(), clocks[1].ms())]
    Clocks {
        /// Name of the first result.
        a: String,
        /// Name of the second result.
        b: String,
        /// Clock of each result.
        clocks: [Clock; 2],
    },
    /// One figure would come from two runs.
    #[error("{what} was measured in {a} and in {b}: leave one of the two out, or a ratio would mix two runs")]
    Twice {
        /// Which figures.
        what: String,
        /// Name of the first result.
        a: String,
        /// Name of the second result.
        b: String,
    },
    /// The pods of two results differ.
    #[error("cannot merge {a} and {b}: their pods differ ({what}: {} and {})", values[0], values[1])]
    Pods {
        /// Name of the first result.
        a: String,
        /// Name of the second result.
        b: String,
        /// Name of the fact that differs.
        what: String,
        /// The fact's value in each result.
        values: [String; 2],
    },
    /// Parts of one run have different plans.
    #[error("{a} and {b} are not parts of one run: {what}")]
    Parts {
        /// Name of the first result.
        a: String,
        /// Name of the second result.
        b: String,
        /// What differs.
        what: String,
    },
    /// No result was given.
    #[error("there is no result to merge")]
    None,
}

/// Merges results. Starts of the reference are pooled; each series of another handler comes from one run.
pub fn merge(results: &[Loaded]) -> Result<(Report, Vec<Sample>), MergeError> {
    let (first, others) = results.split_first().ok_or(MergeError::None)?;
    for other in others {
        alike(first, other)?;
    }
    no_figure_twice(results)?;
    let (runtimes, samples, batches) = all_of(results);
    let mut report = Report { clock: first.report.clock, ..Report::new(manifest(results)) };
    report.add_startup(&runtimes, &samples, &batches);
    report.ratios.clear();
    rates(&mut report, results);
    for result in results {
        add(&mut report, result);
    }
    report.notes.push(format!("merged from {} runs; each ratio is within one of them", results.len()));
    Ok((report, samples))
}

/// Joins parts of one run: the same handlers in the same order, on the same kind of host and VMM. Each part has equally
/// many starts of each handler, so that no ratio compares two hosts.
pub fn join(parts: &[Loaded]) -> Result<(Report, Vec<Sample>), MergeError> {
    let (first, others) = parts.split_first().ok_or(MergeError::None)?;
    for other in others {
        alike(first, other)?;
        one_run(first, other)?;
    }
    let (runtimes, samples, batches) = all_of(parts);
    let baseline = first.report.baseline.clone();
    let mut report = Report { clock: first.report.clock, baseline, ..Report::new(manifest(parts)) };
    report.add_startup(&runtimes, &samples, &batches);
    rates(&mut report, parts);
    report.overhead = first.report.overhead.clone();
    let absent = first.report.not_measured.clone().into_iter();
    report.not_measured.extend(absent.filter(|(name, _)| !name.starts_with("series.")));
    report.notes.push(format!("joined from {} parts", parts.len()));
    Ok((report, samples))
}

fn one_run(a: &Loaded, b: &Loaded) -> Result<(), MergeError> {
    let parts = |what: String| MergeError::Parts { a: a.name.clone(), b: b.name.clone(), what };
    if let Some(why) = [a, b].iter().find_map(|part| part.report.partial_reason.as_deref()) {
        return Err(parts(format!("one of them is partial: {why}")));
    }
    let starts = |result: &Loaded| -> BTreeSet<(String, String, u32)> {
        let series = result.report.series.iter();
        series.map(|series| (series.runtime.clone(), series.mode.to_string(), series.group)).collect()
    };
    if starts(a) != starts(b) {
        return Err(parts("their handlers or groups differ".into()));
    }
    let even = |result: &Loaded| {
        let n: BTreeSet<_> = result.report.series.iter().map(|s| (s.mode.to_string(), s.summary.n)).collect();
        let modes: BTreeSet<_> = n.iter().map(|(mode, _)| mode).collect();
        n.len() == modes.len()
    };
    if let Some(uneven) = [a, b].into_iter().find(|part| !even(part)) {
        return Err(parts(format!("{} has more starts of one handler than of another", uneven.name)));
    }
    let (of_a, of_b) = (&a.report.manifest, &b.report.manifest);
    let mut other = facts("host", &SAME_HOST, &of_a.host, &of_b.host);
    other.extend(facts("VMM", &SAME_VMM, &of_a.vmm, &of_b.vmm));
    match other.into_iter().next() {
        Some(other) => Err(parts(format!("{}: {} and {}", other.what, other.values[0], other.values[1]))),
        None => Ok(()),
    }
}

/// Concatenates the handlers, starts and groups of all results, in order.
fn all_of(results: &[Loaded]) -> (Vec<String>, Vec<Sample>, Vec<Batch>) {
    let mut samples = Vec::new();
    let mut runtimes: Vec<String> = Vec::new();
    for result in results {
        for series in &result.report.series {
            if !runtimes.contains(&series.runtime) {
                runtimes.push(series.runtime.clone());
            }
        }
        add_samples(&mut samples, &result.samples);
    }
    let batches = batches_of(&samples);
    (runtimes, samples, batches)
}

/// Adds the sustained rates of the handlers: parts of one run follow each other.
fn rates(report: &mut Report, results: &[Loaded]) {
    for series in report.series.iter_mut().filter(|series| series.mode == Mode::Sustained) {
        let all_series = results.iter().flat_map(|result| &result.report.series);
        let rates = all_series
            .filter(|other| (&other.runtime, other.mode) == (&series.runtime, series.mode))
            .map(|other| other.rate);
        series.rate =
            rates.collect::<Option<Vec<Rate>>>().and_then(|rates| rates.into_iter().reduce(Rate::and));
    }
}

fn alike(a: &Loaded, b: &Loaded) -> Result<(), MergeError> {
    let names = || (a.name.clone(), b.name.clone());
    let clocks = [a.report.clock, b.report.clock];
    let (name_a, name_b) = names();
    if clocks[0] != clocks[1] {
        return Err(MergeError::Clocks { a: name_a, b: name_b, clocks });
    }
    // Memory and start-up may be measured with different annotations.
    let other = facts("pod", &SAME_POD, &a.report.manifest.pod, &b.report.manifest.pod);
    match other.into_iter().next() {
        Some(other) => Err(MergeError::Pods { a: name_a, b: name_b, what: other.what, values: other.values }),
        None => Ok(()),
    }
}

/// Checks that a handler's starts of one mode come from one run, and that all groups of a series have one size.
fn no_figure_twice(results: &[Loaded]) -> Result<(), MergeError> {
    let mut seen: BTreeMap<(String, String), (&str, u32)> = BTreeMap::new();
    let mut sizes: BTreeMap<String, &str> = BTreeMap::new();
    for result in results {
        let name = &*result.name;
        for series in &result.report.series {
            let what = format!("{} {}", series.runtime, series.mode);
            let twice =
                |a: &str, what: String| MergeError::Twice { what, a: a.to_owned(), b: name.to_owned() };
            let key = (what.clone(), String::new());
            if let Some((a, group)) = seen.insert(key, (name, series.group))
                && (series.runtime != REFERENCE || group != series.group)
            {
                return Err(twice(a, format!("{what} (groups of {group} and {})", series.group)));
            }
        }
        for row in &result.report.memory {
            let what = format!("memory of {} with {} pods", row.runtime, row.pods);
            if let Some(a) = sizes.insert(what.clone(), name) {
                return Err(MergeError::Twice { what, a: a.to_owned(), b: name.to_owned() });
            }
        }
    }
    Ok(())
}

/// Renumbers rounds to continue those of earlier runs, so that each row is a separate start.
fn add_samples(all: &mut Vec<Sample>, more: &[Sample]) {
    let mut next: BTreeMap<(String, Mode, bool), u32> = BTreeMap::new();
    for sample in all.iter() {
        let next = next.entry((sample.runtime.clone(), sample.mode, sample.warm_up)).or_default();
        *next = (*next).max(sample.round + 1);
    }
    all.extend(more.iter().cloned().map(|mut sample| {
        let key = (sample.runtime.clone(), sample.mode, sample.warm_up);
        sample.round += next.get(&key).copied().unwrap_or_default();
        sample
    }));
}

/// Returns the first run's conditions, with the additional facts of the others.
fn manifest(results: &[Loaded]) -> Manifest {
    let mut all = results[0].report.manifest.clone();
    all.plan = Default::default();
    for result in results {
        let manifest = &result.report.manifest;
        all.plan.insert(result.name.clone(), json!(manifest.plan));
        for (handler, facts) in &manifest.runtimes {
            let all = all.runtimes.entry(handler.clone()).or_default();
            all.extend(facts.clone());
            // Only pods that a daemon reports have vCPUs.
            if facts.contains_key("vcpus") {
                let vmm = ["vmm", "vmm_version", "accelerator"].map(|name| manifest.vmm.get(name).map(shown));
                let vmm: Vec<String> = vmm.into_iter().flatten().collect();
                all.insert("vmm".into(), vmm.join(" ").into());
            }
        }
    }
    all
}

fn add(report: &mut Report, result: &Loaded) {
    let added = &result.report;
    report.ratios.extend(added.ratios.iter().cloned());
    report.memory.extend(added.memory.iter().cloned());
    report.marginal_kib_per_pod.extend(added.marginal_kib_per_pod.clone());
    report.overhead = report.overhead.take().or_else(|| added.overhead.clone());
    report.bare_boot = report.bare_boot.take().or_else(|| added.bare_boot.clone());
    // The reason comes from the run that should have measured the figure, and only if it is still absent.
    let absent: BTreeSet<String> = report.not_measured.keys().cloned().collect();
    let here = |name: &String| absent.contains(name) || !name.starts_with("series.");
    report.not_measured.extend(added.not_measured.clone().into_iter().filter(|(name, _)| here(name)));
    report.partial |= added.partial;
    if let Some(why) = &added.partial_reason {
        let why = format!("{}: {why}", result.name);
        report.partial_reason = Some(match report.partial_reason.take() {
            Some(before) => format!("{before}; {why}"),
            None => why,
        });
    }
    report.quick |= added.quick;
    report.baseline = report.baseline.take().or_else(|| added.baseline.clone());
    for note in &added.notes {
        if !report.notes.contains(note) {
            report.notes.push(note.clone());
        }
    }
    let different = facts("host", &SAME_HOST, &report.manifest.host, &added.manifest.host);
    for other in different {
        report
            .notes
            .push(format!("{}: {}: {} | {}", result.name, other.what, other.values[0], other.values[1]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sandboxer_probe::manifest::Facts;
    use sandboxer_probe::sample::Outcome;

    fn run(name: &str, vmm: &str, starts: &[(&str, f64)]) -> Loaded {
        let samples: Vec<Sample> = (0..20)
            .flat_map(|round| starts.iter().map(move |(runtime, ms)| (round, *runtime, *ms)))
            .map(|(round, runtime, ms)| Sample {
                runtime: runtime.into(),
                mode: Mode::Serial,
                round,
                index: 0,
                warm_up: false,
                released_ms: 0.0,
                pod_ms: None,
                created_ms: None,
                started_ms: None,
                first_byte_ms: Some(ms + f64::from(round) / 10.0),
                outcome: Outcome::Ok,
                failed_at: String::new(),
                error: String::new(),
                stages: Default::default(),
                kvm_exits: None,
                first_ping_ms: None,
            })
            .collect();
        let mut manifest = Manifest::default();
        manifest.vmm.insert("vmm".into(), json!(vmm));
        for (runtime, _) in starts {
            let vcpus = (*runtime != REFERENCE).then(|| ("vcpus".to_owned(), json!(1)));
            manifest.runtimes.insert((*runtime).to_owned(), vcpus.into_iter().collect::<Facts>());
        }
        let mut report = Report { clock: Clock::Virtual, ..Report::new(manifest) };
        let runtimes: Vec<String> = starts.iter().map(|(runtime, _)| (*runtime).to_owned()).collect();
        report.add_startup(&runtimes, &samples, &[]);
        Loaded { name: name.into(), report, samples }
    }

    #[test]
    fn ratios_stay_those_of_their_runs() {
        // The second run's host was twice as slow.
        let runs = [
            run("one", "qemu", &[("own", 50.0), ("runc", 100.0)]),
            run("two", "ch", &[("own-ch", 160.0), ("runc", 200.0)]),
        ];
        let (report, samples) = merge(&runs).unwrap();
        let over = |name: &str| report.over_reference(name, Mode::Serial, false).unwrap().p50;
        assert!((over("own") - 0.5).abs() < 0.02 && (over("own-ch") - 0.8).abs() < 0.02);
        assert_eq!(report.clock, Clock::Virtual);
        let n: Vec<(&str, usize)> = report.series.iter().map(|s| (&*s.runtime, s.summary.n)).collect();
        assert_eq!(n, [("own", 20), ("runc", 40), ("own-ch", 20)]);
        let mut rounds: Vec<u32> = samples.iter().filter(|s| s.runtime == "runc").map(|s| s.round).collect();
        rounds.dedup();
        assert_eq!(rounds, (0..40).collect::<Vec<u32>>());
        assert_eq!(report.manifest.runtimes["own-ch"]["vmm"], "ch");
        assert_eq!(report.manifest.runtimes["own"]["vmm"], "qemu");
    }

    #[test]
    fn parts_of_one_run_are_one_run() {
        let both = [("own", 50.0), ("runc", 100.0)];
        let (report, samples) = join(&[run("a", "qemu", &both), run("b", "qemu", &both)]).unwrap();
        assert_eq!(report.series.iter().map(|s| s.summary.n).collect::<Vec<_>>(), [40, 40]);
        let ratio = report.over_reference("own", Mode::Serial, false).unwrap();
        assert!((ratio.p50 - 0.5).abs() < 0.02 && !report.partial, "{ratio:?}");
        assert_eq!(samples.iter().filter(|s| s.runtime == "own").map(|s| s.round).max(), Some(39));
    }

    #[test]
    fn a_groups_time_stays_beside_its_own_spread_when_another_group_failed() {
        let group = |name: &str, wall: Option<f64>, spread: f64| {
            let mut result = run(name, "qemu", &[("own", 50.0), ("runc", 100.0)]);
            let pod = |index: u32| Sample {
                index,
                released_ms: 1000.0 + if index == 1 { spread } else { 0.0 },
                outcome: if wall.is_none() && index == 1 { Outcome::Failed } else { Outcome::Ok },
                ..Sample::new(
                    "own",
                    Mode::Parallel,
                    wall.unwrap_or(1.0) - if index == 1 { spread } else { 0.0 },
                )
            };
            let more = [pod(0), pod(1)];
            let runtimes = ["own", "runc"].map(str::to_owned);
            result.samples.extend(more);
            let mut report = Report { clock: Clock::Virtual, ..Report::new(result.report.manifest.clone()) };
            report.add_startup(&runtimes, &result.samples, &batches_of(&result.samples));
            Loaded { report, ..result }
        };
        let parts = [group("a", None, 7.0), group("b", Some(300.0), 2.0), group("c", Some(400.0), 3.0)];
        let (report, _) = join(&parts).unwrap();
        let series = report.series.iter().find(|series| series.mode == Mode::Parallel).unwrap();
        assert_eq!(series.release_spread_ms, [7.0, 2.0, 3.0]);
        assert_eq!(series.batch_ms, [None, Some(300.0), Some(400.0)]);
        let whole = series.whole_groups().unwrap();
        assert_eq!((whole.n, whole.failures, whole.p50_ms), (3, 1, Some(300.0)));
    }

    #[test]
    fn what_is_no_part_of_the_same_run_is_refused_by_name() {
        let both = [("own", 50.0), ("runc", 100.0)];
        let a = run("a", "qemu", &both);
        let refused = |other: Loaded, words: &str| {
            let why = join(&[a.clone(), other]).unwrap_err().to_string();
            assert!(why.contains(words), "{why}");
        };
        refused(run("b", "qemu", &both[..1]), "handlers");
        refused(run("b", "cloud-hypervisor", &both), "cloud-hypervisor");
        let mut partial = run("b", "qemu", &both);
        partial.report.partial_reason = Some("interrupted".into());
        refused(partial, "interrupted");
        let mut uneven = run("b", "qemu", &both);
        uneven.report.series[0].summary.n -= 1;
        refused(uneven, "b has more starts of one handler");
        let mut wall = run("b", "qemu", &both);
        wall.report.clock = Clock::Wall;
        refused(wall, "two clocks");
    }

    #[test]
    fn what_would_mix_is_refused_by_name() {
        let a = run("one", "qemu", &[("own", 50.0), ("runc", 100.0)]);
        let why = merge(&[a.clone(), run("two", "qemu", &[("own", 50.0)])]).unwrap_err().to_string();
        assert!(why.contains("own serial") && why.contains("one") && why.contains("two"), "{why}");
        let mut wall = run("two", "ch", &[("own-ch", 160.0)]);
        wall.report.clock = Clock::Wall;
        let why = merge(&[a.clone(), wall]).unwrap_err().to_string();
        assert!(why.contains("two clocks"), "{why}");
        let mut other = run("two", "ch", &[("own-ch", 160.0)]);
        other.report.manifest.pod.insert("image_digest".into(), json!("another"));
        let why = merge(&[a, other]).unwrap_err().to_string();
        assert!(why.contains("image digest") && why.contains("another"), "{why}");
        assert!(matches!(merge(&[]), Err(MergeError::None)));
    }
}
