//! The results that `docs/results` has, of earlier versions and of this one, can still be used, and nothing of them is lost but
//! intervals of fewer than three groups.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail their test")]

use std::fs;
use std::path::{Path, PathBuf};

use sandboxer_probe::report;
use sandboxer_probe::results::Results;
use sandboxer_probe::workload;
use serde_json::Value;

/// Finds the directories with a result, at any depth.
fn find(dir: &Path, found: &mut Vec<PathBuf>) {
    if ["report.json", "workload.json"].iter().any(|name| dir.join(name).exists()) {
        found.push(dir.to_owned());
    }
    for entry in fs::read_dir(dir).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        find(&entry.path(), found);
    }
}

/// Returns what `before` has and `after` has not, by its path.
fn lost(at: &str, before: &Value, after: &Value) -> Vec<String> {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            let one = |(name, value): (&String, &Value)| {
                lost(&format!("{at}/{name}"), value, after.get(name).unwrap_or(&Value::Null))
            };
            before.iter().flat_map(one).collect()
        }
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => {
            let pairs = before.iter().zip(after).enumerate();
            pairs.flat_map(|(index, (before, after))| lost(&format!("{at}/{index}"), before, after)).collect()
        }
        (Value::Number(before), Value::Number(after)) if before.as_f64() == after.as_f64() => Vec::new(),
        _ if before == after => Vec::new(),
        // Earlier versions gave an interval to fewer than three groups, too; none is shown of so few.
        (Value::Number(_), Value::Null) if at.ends_with("/ci_low") || at.ends_with("/ci_high") => Vec::new(),
        _ => vec![format!("{at}: {before} became {after}")],
    }
}

#[test]
fn every_recorded_result_is_read_and_nothing_of_it_is_lost() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    let mut dirs = Vec::new();
    find(&root, &mut dirs);
    assert!(dirs.len() >= 14, "{dirs:?}");
    for dir in dirs {
        let results = Results::load(std::slice::from_ref(&dir))
            .unwrap_or_else(|error| panic!("{}: {error:?}", dir.display()));
        let (name, written) = match (&results.startups[..], &results.workloads[..]) {
            ([result], []) => ("report.json", report::render(&result.report)),
            ([], [result]) => ("workload.json", workload::report::render(&result.report).unwrap()),
            other => panic!("{}: {other:?}", dir.display()),
        };
        let before: Value = serde_json::from_str(&fs::read_to_string(dir.join(name)).unwrap()).unwrap();
        let lost = lost("", &before, &serde_json::from_str(&written).unwrap());
        assert!(lost.is_empty(), "{}: {lost:#?}", dir.display());
        assert!(
            !results.runtimes().is_empty()
                || results.startups.iter().any(|result| !result.report.memory.is_empty())
        );
    }
}
