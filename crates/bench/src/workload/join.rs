//! Joins rounds of one plan that were measured in several parts.

use std::collections::BTreeMap;

use sandboxer_probe::compare::{SAME_HOST, SAME_POD, SAME_VMM, facts};
use sandboxer_probe::workload::report::Report;
use sandboxer_probe::workload::run::Run;
use sandboxer_probe::workload::store::Loaded;
use serde_json::json;

use crate::merge::MergeError;

/// Joins parts of one measurement: the same runtimes in the same order, with the same probes, on the same kind of host
/// and VMM. The runtimes alternate within each part.
pub fn join(parts: &[Loaded]) -> Result<(Report, Vec<Run>), MergeError> {
    let (first, others) = parts.split_first().ok_or(MergeError::None)?;
    for other in others {
        if let Some(what) = difference(first, other) {
            return Err(MergeError::Parts { a: first.name.clone(), b: other.name.clone(), what });
        }
    }
    let runs = renumbered(parts);
    let mut report = first.report.clone();
    report.repeat = parts.iter().map(|part| part.report.repeat).sum();
    report.manifest.plan =
        parts.iter().map(|part| (part.name.clone(), json!(part.report.manifest.plan))).collect();
    report.notes = vec![format!("joined from {} parts", parts.len())];
    report.notes.extend(given_notes(parts));
    report.evaluate(&first.runtimes(), &runs);
    Ok((report, runs))
}

/// Returns the first difference that shows two results not to be parts of one measurement.
fn difference(a: &Loaded, b: &Loaded) -> Option<String> {
    let (of_a, of_b) = (&a.report, &b.report);
    if let Some(why) = [of_a, of_b].iter().find_map(|part| part.partial_reason.as_deref()) {
        return Some(format!("one of them is partial: {why}"));
    }
    let same = [
        ("clocks", of_a.clock == of_b.clock),
        ("profiles", of_a.profile == of_b.profile),
        ("numbers of warm-up rounds", of_a.warm_up == of_b.warm_up),
        ("numbers of threads", of_a.threads == of_b.threads),
        ("runtimes of clients", of_a.client_runtime == of_b.client_runtime),
        ("probes or their parameters", of_a.probes == of_b.probes),
        ("runtimes or their order", a.runtimes() == b.runtimes()),
    ];
    if let Some((what, _)) = same.iter().find(|(_, same)| !same) {
        return Some(format!("their {what} differ"));
    }
    let (a, b) = (&of_a.manifest, &of_b.manifest);
    let mut other = facts("pod", &SAME_POD, &a.pod, &b.pod);
    other.extend(facts("plan", &["cpus", "memory_bytes"], &a.plan, &b.plan));
    other.extend(facts("host", &SAME_HOST, &a.host, &b.host));
    other.extend(facts("VMM", &SAME_VMM, &a.vmm, &b.vmm));
    other.first().map(|difference| {
        format!("{}: {} and {}", difference.what, difference.values[0], difference.values[1])
    })
}

/// Returns all runs, with rounds that continue those of earlier parts.
fn renumbered(parts: &[Loaded]) -> Vec<Run> {
    let mut before: BTreeMap<bool, u32> = BTreeMap::new();
    let mut all = Vec::new();
    for part in parts {
        all.extend(part.runs.iter().cloned().map(|mut run| {
            run.round += before.get(&run.warm_up).copied().unwrap_or_default();
            run
        }));
        *before.entry(false).or_default() += part.report.repeat;
        *before.entry(true).or_default() += part.report.warm_up;
    }
    all
}

/// Returns the notes of the parts that were not derived from figures, each once.
fn given_notes(parts: &[Loaded]) -> Vec<String> {
    let mut notes: Vec<String> = Vec::new();
    for part in parts {
        let mut evaluated = part.report.clone();
        evaluated.notes.clear();
        evaluated.evaluate(&part.runtimes(), &part.runs);
        let given = part.report.notes.iter().filter(|note| !evaluated.notes.contains(note));
        for note in given {
            if !notes.contains(note) {
                notes.push(note.clone());
            }
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::made_up::result;
    use sandboxer_probe::workload::definition::Profile;

    #[test]
    fn rounds_of_all_parts_count() {
        let (mut a, mut b) = (result(Profile::Quick), result(Profile::Quick));
        b.name = "second".into();
        a.report.notes.push("gvisor: its limits are not checked".into());
        for run in &mut b.runs {
            run.figures.values_mut().for_each(|value| *value *= 3.0);
        }
        let (report, runs) = join(&[a.clone(), b]).unwrap();
        assert_eq!((report.repeat, runs.len()), (10, 2 * a.runs.len()));
        assert_eq!(runs.iter().map(|run| run.round).max(), Some(9));
        let native = report.series.iter().find(|series| series.runtime == "native").unwrap();
        assert_eq!((native.n, native.min, native.max), (10, Some(100.0), Some(300.0)));
        let again = |text: &str| report.notes.iter().filter(|note| note.contains(text)).count();
        assert_eq!(
            (again("gvisor"), again("quick:"), again("joined from 2")),
            (1, 1, 1),
            "{:?}",
            report.notes
        );
    }

    #[test]
    fn results_of_two_plans_are_refused_by_the_difference() {
        let a = result(Profile::Quick);
        let refused = |change: &dyn Fn(&mut Loaded)| {
            let mut b = a.clone();
            change(&mut b);
            join(&[a.clone(), b]).unwrap_err().to_string()
        };
        assert!(refused(&|b| b.report.profile = Profile::Paper).contains("their profiles differ"));
        assert!(refused(&|b| b.report.probes[0].quick.takes += 1.0).contains("parameters"));
        assert!(refused(&|b| b.report.partial_reason = Some("stopped".into())).contains("stopped"));
        let slower = refused(&|b| drop(b.report.manifest.host.insert("cpus".into(), json!(3))));
        assert!(slower.contains("cpus"), "{slower}");
        assert!(matches!(join(&[]), Err(MergeError::None)));
    }
}
