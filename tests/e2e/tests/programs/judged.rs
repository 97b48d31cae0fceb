//! How a program ended under both runtimes, what of it differs, and the table of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use sandboxer_e2e::document;

use crate::{KNOWN, PROGRAMS, Program};

/// How a program ended.
pub struct Ending {
    /// The exit code; `None` if it could not be started or did not end.
    pub exit: Option<i32>,
    /// What is compared.
    pub stdout: String,
    /// What is not.
    pub stderr: String,
    /// Time with the start of its pod.
    pub took: Duration,
}

impl Ending {
    /// Returns exit code and time.
    pub fn summary(&self) -> String {
        format!("{} ({:.1} s)", self.exit(), self.took.as_secs_f64())
    }

    fn exit(&self) -> String {
        self.exit.map_or_else(|| "no end".to_owned(), |exit| format!("exit {exit}"))
    }

    /// Returns everything that it printed.
    pub fn all(&self) -> String {
        format!("{}{}{}\n", self.stdout, self.stderr, self.exit())
    }

    /// Returns what is compared, line by line.
    fn lines(&self) -> Vec<String> {
        self.stdout.lines().map(str::to_owned).chain([self.exit()]).collect()
    }
}

/// A line of the table.
pub struct Row {
    program: &'static str,
    cells: [String; 3],
    /// What makes the case fail.
    pub errors: Vec<String>,
}

/// Compares how a program ended.
pub fn judge(program: &'static Program, runc: &Ending, ours: &Ending) -> Row {
    let (control, subject) = (runc.lines(), ours.lines());
    let mut notes = Vec::new();
    let mut errors = Vec::new();
    for line in 0..control.len().max(subject.len()) {
        let line_of = |lines: &[String]| lines.get(line).cloned().unwrap_or_default();
        let (control, subject) = (line_of(&control), line_of(&subject));
        if control != subject {
            let text = format!("{subject:?}, runc {control:?}");
            match why(program.name, &control, &subject) {
                Some(why) => notes.push(format!("{text}: {why}")),
                None => errors.push(text),
            }
        }
    }
    if runc.exit != Some(0) && why(program.name, &runc.exit(), &ours.exit()).is_none() {
        errors.push("the program does not work beside runc".to_owned());
    }
    let verdict = |ending: &Ending| if ending.exit == Some(0) { "works" } else { "**fails**" }.to_owned();
    let mut cell = vec![verdict(ours)];
    cell.extend(notes.iter().map(|note| format!("known difference: {note}")));
    // One tells enough: what follows the first difference often is its consequence.
    cell.extend(errors.first().map(|error| format!("**differs**: {error}")));
    Row { program: program.name, cells: [program.what.to_owned(), verdict(runc), cell.join("<br>")], errors }
}

/// Returns why a difference is meant.
fn why(program: &str, runc: &str, ours: &str) -> Option<&'static str> {
    let is_of = |pattern: &str, text: &str| match pattern.strip_suffix('*') {
        Some(start) => text.starts_with(start),
        None => text == pattern,
    };
    let known = KNOWN
        .iter()
        .find(|known| known.program == program && is_of(known.runc, runc) && is_of(known.ours, ours))?;
    Some(known.why)
}

/// Mark before the table in a document.
const MARK: &str = "<!-- made by the run of make test-programs -->\n";

/// Writes the table into a document. Rows of programs that did not run stay.
pub fn put_into(document: &Path, rows: &[Row]) -> Result<()> {
    document::replace(document, MARK, |old| {
        let name = |line: &str| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned());
        let mut all: BTreeMap<String, String> =
            old.lines().filter_map(|line| Some((name(line)?, line.to_owned()))).collect();
        for row in rows {
            let cells = row.cells.join(" | ").replace('\n', " ");
            all.insert(row.program.to_owned(), format!("| `{}` | {cells} |", row.program));
        }
        let mut table = "| program | what is done | runc | sandboxer |\n|---|---|---|---|\n".to_owned();
        for line in PROGRAMS.iter().filter_map(|program| all.get(program.name)) {
            table += &format!("{line}\n");
        }
        table
    })
}
