//! What a check comes to.

use std::fmt;

use serde::Serialize;

/// Version of the shape in which a [`Report`] is written as JSON.
pub const SCHEMA: u32 = 1;

/// How a check ended, the least worrying first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Nothing here depends on it.
    NotApplicable,
    /// As it should be.
    Ok,
    /// Pods run, but worse than they could, or not as many as asked about.
    Warning,
    /// Pods don't run.
    Failure,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::NotApplicable => "n/a",
            Verdict::Ok => "ok",
            Verdict::Warning => "warning",
            Verdict::Failure => "failure",
        })
    }
}

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// What it comes to.
    pub verdict: Verdict,
    /// What was seen.
    pub seen: String,
    /// Why it matters.
    pub why: &'static str,
    /// What to do; none where nothing is to be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<Fix>,
}

/// One sentence: what was seen, what to do.
impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.seen)?;
        self.fix.as_ref().map_or(Ok(()), |fix| write!(f, "; {}", fix.what))
    }
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fix {
    /// In words.
    pub what: String,
    /// As commands for root's shell, where it can be said so.
    pub commands: Vec<String>,
}

impl Fix {
    /// Returns what no command does.
    pub fn words(what: impl Into<String>) -> Self {
        Self { what: what.into(), commands: Vec::new() }
    }

    /// Returns what these commands do.
    pub fn commands<C: Into<String>>(what: impl Into<String>, commands: impl IntoIterator<Item = C>) -> Self {
        Self { what: what.into(), commands: commands.into_iter().map(Into::into).collect() }
    }
}

/// What a check is about; each verdict on it is made here.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) why: &'static str,
}

impl Subject {
    pub(super) fn ok(&self, seen: impl Into<String>) -> Check {
        self.check(Verdict::Ok, seen, None)
    }

    pub(super) fn not_applicable(&self, seen: impl Into<String>) -> Check {
        self.check(Verdict::NotApplicable, seen, None)
    }

    pub(super) fn warning(&self, seen: impl Into<String>, fix: Fix) -> Check {
        self.check(Verdict::Warning, seen, Some(fix))
    }

    pub(super) fn failure(&self, seen: impl Into<String>, fix: Fix) -> Check {
        self.check(Verdict::Failure, seen, Some(fix))
    }

    fn check(&self, verdict: Verdict, seen: impl Into<String>, fix: Option<Fix>) -> Check {
        Check { name: self.name, verdict, seen: seen.into(), why: self.why, fix }
    }
}

/// Everything looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The worst of all.
    pub verdict: Verdict,
    /// Pods for which memory, disk and limits must do.
    pub pods: u32,
    /// In the order in which they are shown.
    pub checks: Vec<Check>,
}

impl Report {
    pub(super) fn new(pods: u32, checks: Vec<Check>) -> Self {
        let verdict = checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Ok).max(Verdict::Ok);
        Self { schema: SCHEMA, verdict, pods, checks }
    }

    /// Returns the exit code: 0, 1 for warnings, 2 for failures.
    pub fn exit_code(&self) -> u8 {
        match self.verdict {
            Verdict::NotApplicable | Verdict::Ok => 0,
            Verdict::Warning => 1,
            Verdict::Failure => 2,
        }
    }

    /// Returns how many checks ended so.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.checks.iter().filter(|check| check.verdict == verdict).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOOR: Subject = Subject { name: "door", why: "wind" };

    #[test]
    fn the_worst_check_decides() {
        let close = || Fix::words("close it");
        let (none, ok) = (DOOR.not_applicable("no door"), DOOR.ok("shut"));
        let (warning, failure) = (DOOR.warning("ajar", close()), DOOR.failure("gone", close()));
        for (checks, verdict, code) in [
            (vec![], Verdict::Ok, 0),
            (vec![none.clone()], Verdict::Ok, 0),
            (vec![ok.clone(), none], Verdict::Ok, 0),
            (vec![warning.clone(), ok], Verdict::Warning, 1),
            (vec![failure, warning], Verdict::Failure, 2),
        ] {
            let report = Report::new(1, checks);
            assert_eq!((report.verdict, report.exit_code()), (verdict, code));
        }
    }

    #[test]
    fn a_check_is_one_sentence() {
        assert_eq!(DOOR.ok("shut").to_string(), "door: shut");
        assert_eq!(DOOR.warning("ajar", Fix::words("close it")).to_string(), "door: ajar; close it");
    }
}
