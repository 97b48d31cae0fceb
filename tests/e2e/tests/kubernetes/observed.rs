//! What cases saw on both runtime classes, what differs, and the table of it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sandboxer_e2e::document;
use serde::Deserialize;

/// One thing that a case looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// What was looked at.
    pub what: String,
    /// What was there.
    pub seen: String,
    /// What any runtime should show.
    pub wanted: String,
}

/// What one case saw on one class; a case that could not go on ends with why.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// In the order of the case.
    pub seen: Vec<Seen>,
    /// Why the case could not go on.
    pub failed: Option<String>,
}

/// A difference from runc that is accepted, with the reason.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    pub case: String,
    /// What it looks at.
    pub what: String,
    /// Why it differs.
    pub why: String,
    /// The observation depends on chance, so it need not show.
    #[serde(default)]
    pub sometimes: bool,
}

/// Accepted differences; one that does not show any more is an error of the run, too.
const KNOWN: &str = include_str!("differences.json");

/// Returns the list of accepted differences.
pub fn known() -> Result<Vec<Known>> {
    serde_json::from_str(KNOWN).context("differences.json")
}

/// Outcomes of cases, by case and class.
pub type Outcomes = BTreeMap<&'static str, BTreeMap<&'static str, Outcome>>;

/// A case's verdict.
#[derive(Debug)]
pub struct Verdict {
    pub case: &'static str,
    /// How much was compared.
    pub compared: usize,
    /// Accepted differences that showed.
    pub known: Vec<String>,
    /// What makes the run fail.
    pub errors: Vec<String>,
}

/// Compares what both classes saw.
pub fn judge(outcomes: &Outcomes, known: &[Known]) -> Vec<Verdict> {
    outcomes.iter().map(|(case, by)| judge_case(case, by, known)).collect()
}

fn judge_case(case: &'static str, by: &BTreeMap<&'static str, Outcome>, known: &[Known]) -> Verdict {
    let mut verdict = Verdict { case, compared: 0, known: Vec::new(), errors: Vec::new() };
    let empty = Outcome::default();
    let (ours, control) = (by.get("sandboxer").unwrap_or(&empty), by.get("runc").unwrap_or(&empty));
    if let Some(why) = &control.failed {
        verdict.errors.push(format!("runc could not go on, so the test is wrong: {why}"));
    }
    for seen in control.seen.iter().filter(|seen| seen.seen != seen.wanted) {
        let Seen { what, seen, wanted } = seen;
        verdict.errors.push(format!("{what}: runc shows {seen:?}, so the test is wrong to want {wanted:?}"));
    }
    let mut differences = BTreeMap::new();
    if let Some(why) = &ours.failed {
        differences.insert("could not go on".to_owned(), format!("could not go on: {why}"));
    }
    for control in &control.seen {
        match ours.seen.iter().find(|ours| ours.what == control.what) {
            Some(ours) if ours.seen == control.seen => verdict.compared += 1,
            Some(ours) => {
                verdict.compared += 1;
                let text = format!("{}: {:?}, runc {:?}", control.what, ours.seen, control.seen);
                differences.insert(control.what.clone(), text);
            }
            // The failure says so.
            None => {}
        }
    }
    for Known { what, why, sometimes, .. } in known.iter().filter(|known| known.case == case) {
        match differences.remove(what) {
            Some(text) => verdict.known.push(format!("{text}: {why}")),
            // A case that could not go on may not have come there.
            None if *sometimes || ours.failed.is_some() || control.failed.is_some() => {}
            None => {
                verdict.errors.push(format!("{what}: on the list of differences, but it is like runc now"))
            }
        }
    }
    verdict.errors.extend(differences.into_values());
    verdict
}

/// Mark before the table in a document.
const MARK: &str = "<!-- made by the run of make test-kubernetes -->\n";

const HEAD: &str = "| case | compared | beside runc |\n|---|--:|---|\n";

/// Returns the rows of the table, by case.
fn rows(verdicts: &[Verdict]) -> BTreeMap<String, String> {
    let row = |Verdict { case, compared, known, errors }: &Verdict| {
        let mut cells = Vec::new();
        if errors.is_empty() && known.is_empty() {
            cells.push("same".to_owned());
        }
        cells.extend(known.iter().map(|text| format!("known difference: {text}")));
        cells.extend(errors.iter().map(|text| format!("**failed**: {text}")));
        let cells = cells.join("<br>").replace('|', "\\|").replace('\n', " ");
        ((*case).to_owned(), format!("| `{case}` | {compared} | {cells} |\n"))
    };
    verdicts.iter().map(row).collect()
}

pub fn table(verdicts: &[Verdict]) -> String {
    rows(verdicts).values().fold(HEAD.to_owned(), |table, row| table + row)
}

/// Writes the table into a document. Rows of cases that did not run stay.
pub fn put_into(document: &Path, head: &str, verdicts: &[Verdict]) -> Result<()> {
    document::replace(document, MARK, |old| {
        let mut all: BTreeMap<String, String> = old
            .lines()
            .filter_map(|line| {
                Some((line.strip_prefix("| `")?.split('`').next()?.to_owned(), format!("{line}\n")))
            })
            .collect();
        all.extend(rows(verdicts));
        all.into_values().fold(format!("{head}\n\n{HEAD}"), |table, row| table + &row)
    })
}

/// Checks that the list names cases that exist.
pub fn check(known: &[Known], cases: &[&str]) -> Result<()> {
    let lost: Vec<_> =
        known.iter().map(|known| &known.case).filter(|case| !cases.contains(&case.as_str())).collect();
    ensure!(lost.is_empty(), "differences.json names cases that do not exist: {lost:?}");
    Ok(())
}
