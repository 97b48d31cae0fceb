//! docs/security.md and docs/reliability.md name the tests for each promise; all of them exist.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::{fs, path::Path};

#[test]
fn every_promise_is_held_by_tests_that_exist() {
    for (page, least) in [("docs/security.md", 60), ("docs/reliability.md", 40)] {
        let seen = promises(page);
        assert!(seen > least, "{page} has {seen} promises");
    }
}

/// Returns the number of promises on a page: the rows of its tables that begin with `| promise |`.
fn promises(page: &str) -> usize {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = fs::read_to_string(root.join(page)).unwrap();
    let mut in_table = false;
    let mut seen = 0;
    for row in text.lines() {
        in_table = row.starts_with('|') && (in_table || row.starts_with("| promise |"));
        if !in_table || row.starts_with("| promise |") || row.starts_with("|---") {
            continue;
        }
        let (promise, tests) = row.trim_matches('|').rsplit_once('|').unwrap();
        let tests: Vec<_> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!tests.is_empty(), "nothing holds: {promise}");
        for test in tests {
            let (file, name) =
                test.split_once(": ").unwrap_or_else(|| panic!("{test:?} is no file and test"));
            let code = fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
            let defined = if file.ends_with(".py") { "def" } else { "fn" };
            // Tests without the standard harness have their names in strings, those of all VMMs are generic.
            let names = [format!("{defined} {name}("), format!("{defined} {name}<"), format!("\"{name}\"")];
            assert!(names.iter().any(|name| code.contains(name)), "{file} has no test {name}");
        }
        seen += 1;
    }
    seen
}
