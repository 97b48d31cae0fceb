//! The steps of a build job: compiles and tests a small C++ program, checks it for leaks and with a static analyser,
//! and writes its coverage as a page. The sources are embedded in this program.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::result::Line;

/// Name and text of each source.
const SOURCES: [(&str, &str); 4] = [
    ("matrix.hpp", include_str!("../pipeline/matrix.hpp")),
    ("matrix.cpp", include_str!("../pipeline/matrix.cpp")),
    ("catch_tests.cpp", include_str!("../pipeline/catch_tests.cpp")),
    ("plain_tests.cpp", include_str!("../pipeline/plain_tests.cpp")),
];
/// Maximum number of characters of a failed step's output in an error.
const SHOWN: usize = 500;

/// Time the steps of a C++ build job in a new directory below the current one
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Tests with the Catch framework, which takes most of the compiler's time
    #[arg(long)]
    catch: bool,
    /// Tests without it (default)
    #[arg(long, conflicts_with = "catch")]
    plain: bool,
}

/// Runs all steps. A failed step ends the job.
pub fn run(args: &Args) -> Result<()> {
    let dir = Path::new("bench-pipeline");
    ensure!(!dir.exists(), "{} exists: a build begins without it", dir.display());
    let measured = job(dir, &steps(if args.catch { "catch_tests.cpp" } else { "plain_tests.cpp" }));
    // Removes the directory whether or not a step failed.
    let removed = fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()));
    let line = measured?;
    removed?;
    line.print()
}

/// Returns metric and command of each step, as in the thesis's job.
fn steps(tests: &str) -> Vec<(&'static str, Vec<String>)> {
    let words = |text: &str| text.split(' ').map(str::to_owned).collect();
    vec![
        ("compile_s", words(&format!("g++ -std=c++11 --coverage -o tests matrix.cpp {tests}"))),
        ("test_s", words("./tests")),
        (
            "valgrind_s",
            words("valgrind --leak-check=full --show-leak-kinds=all --error-exitcode=9 --quiet ./tests"),
        ),
        ("coverage_s", words("lcov --quiet -c -d . -o coverage.info")),
        ("page_s", words("genhtml --quiet coverage.info -o page")),
        ("analysis_s", words(&format!("cppcheck --enable=style --force --xml --quiet matrix.cpp {tests}"))),
    ]
}

fn job(dir: &Path, steps: &[(&'static str, Vec<String>)]) -> Result<Line> {
    fs::create_dir(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for (name, text) in SOURCES {
        let path = dir.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let (mut line, begun) = (Line::new("pipeline"), Instant::now());
    for (metric, words) in steps {
        let at = Instant::now();
        step(dir, words)?;
        line = line.figure(metric, at.elapsed().as_secs_f64());
    }
    Ok(line.figure("total_s", begun.elapsed().as_secs_f64()))
}

fn step(dir: &Path, words: &[String]) -> Result<()> {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).current_dir(dir).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("cannot run {}", words[0]))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last: String =
        stderr.trim().chars().rev().take(SHOWN).collect::<Vec<_>>().into_iter().rev().collect();
    ensure!(output.status.success(), "{} failed: {}: {last}", words.join(" "), output.status);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_has_its_time_and_they_add_up() {
        let parent = tempfile::tempdir().unwrap();
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<String>>();
        let steps = [("compile_s", words("test -s matrix.cpp")), ("test_s", words("sleep 0.05"))];
        let line = serde_json::to_value(job(&parent.path().join("build"), &steps).unwrap()).unwrap();
        let time = |name: &str| line["metrics"][name].as_f64().unwrap();
        assert!(time("test_s") >= 0.05 && time("total_s") >= time("compile_s") + time("test_s"), "{line}");
    }

    #[test]
    fn a_step_that_fails_or_is_not_there_ends_the_job_with_its_name() {
        let parent = tempfile::tempdir().unwrap();
        let failure = |name: &str, words: &[&str]| {
            let words = words.iter().map(|&word| word.to_owned()).collect();
            job(&parent.path().join(name), &[("compile_s", words)]).unwrap_err()
        };
        let error = failure("a", &["ls", "/no/such"]).to_string();
        assert!(error.contains("ls /no/such failed") && error.contains("No such file"), "{error}");
        assert!(failure("b", &["no-such-compiler"]).to_string().contains("no-such-compiler"));
    }

    #[test]
    fn the_steps_are_those_of_the_study() {
        let all: Vec<String> =
            steps("catch_tests.cpp").into_iter().map(|(_, words)| words.join(" ")).collect();
        assert_eq!(all[0], "g++ -std=c++11 --coverage -o tests matrix.cpp catch_tests.cpp");
        assert!(all[2].contains("--leak-check=full --show-leak-kinds=all"));
        assert!(all[5].starts_with("cppcheck --enable=style --force --xml"));
    }
}
