//! docs/security.md names the test for each promise; all of them exist.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails where it stands")]

use std::{fs, path::Path};

#[test]
fn every_promise_is_held_by_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = fs::read_to_string(root.join("docs/security.md")).unwrap();
    let (_, promises) = text.split_once("## Promises and the tests that hold them").unwrap();
    let (promises, _) = promises.split_once("\n## ").unwrap();
    let rows = promises.lines().filter(|line| line.starts_with('|')).skip(2);
    let mut seen = 0;
    for row in rows {
        let (promise, held_by) = row.trim_matches('|').rsplit_once('|').unwrap();
        let tests: Vec<_> = held_by.split('`').skip(1).step_by(2).collect();
        assert!(!tests.is_empty(), "nothing holds: {promise}");
        for test in tests {
            let (file, name) =
                test.split_once(": ").unwrap_or_else(|| panic!("{test:?} is no file and test"));
            let code = fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
            let defined = if file.ends_with(".py") { "def" } else { "fn" };
            assert!(code.contains(&format!("{defined} {name}(")), "{file} has no test {name}");
        }
        seen += 1;
    }
    assert!(seen > 10, "{seen} promises");
}
