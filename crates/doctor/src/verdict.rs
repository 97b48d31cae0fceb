//! Results of checks.

use std::fmt;

use serde::Serialize;

/// Version of a [`Report`]'s JSON format.
pub const SCHEMA: u32 = 1;

/// The result of a check, from harmless to severe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The check does not apply: nothing here depends on it.
    NotApplicable,
    /// The check found no problem.
    Ok,
    /// Pods run, but not at their best, or not as many as requested.
    Warning,
    /// Pods do not run.
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

/// A check and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Name of the check.
    pub name: &'static str,
    /// The result.
    pub verdict: Verdict,
    /// A description of what was found.
    pub seen: String,
    /// The reason why the check matters.
    pub why: &'static str,
    /// The fix, if one is needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<Fix>,
}

/// Formats one sentence: what was found, and the fix.
impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.seen)?;
        self.fix.as_ref().map_or(Ok(()), |fix| write!(f, "; {}", fix.what))
    }
}

/// A fix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fix {
    /// Text of the fix.
    pub what: String,
    /// Commands for a root shell, where possible.
    pub commands: Vec<String>,
}

impl Fix {
    /// Returns a fix without commands.
    pub fn words(what: impl Into<String>) -> Self {
        Self { what: what.into(), commands: Vec::new() }
    }

    /// Returns a fix with commands.
    pub fn commands<C: Into<String>>(what: impl Into<String>, commands: impl IntoIterator<Item = C>) -> Self {
        Self { what: what.into(), commands: commands.into_iter().map(Into::into).collect() }
    }
}

/// The subject of a check, which constructs its results.
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

/// The results of all checks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Version of the format: [`SCHEMA`].
    pub schema: u32,
    /// The most severe result.
    pub verdict: Verdict,
    /// Number of pods that memory, disk and limits must suffice for.
    pub pods: u32,
    /// The checks, in display order.
    pub checks: Vec<Check>,
}

impl Report {
    pub(super) fn new(pods: u32, checks: Vec<Check>) -> Self {
        let verdict = checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Ok).max(Verdict::Ok);
        Self { schema: SCHEMA, verdict, pods, checks }
    }

    /// Returns the exit code: 0 without problems, 1 with warnings, 2 with failures.
    pub fn exit_code(&self) -> u8 {
        match self.verdict {
            Verdict::NotApplicable | Verdict::Ok => 0,
            Verdict::Warning => 1,
            Verdict::Failure => 2,
        }
    }

    /// Returns the number of checks with this result.
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
