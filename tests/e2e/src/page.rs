//! A page of documentation whose commands are run by tests. Before each block of `sh` a comment says where it runs, and the
//! block's name there: `<!-- node: install -->`. `<!-- file: pod.json -->` before another block makes it a file beside them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// Where a block runs: `host` beside the clone, by scripts/test-deb.sh; `node` in a node VM with the package, and `source` there
/// after the package has gone, both by tests/package; `cluster` by tests/kubernetes; `doors`, `docker` and `crio` by the end-to-end cases; `nowhere`
/// for the reason that is given.
const PLACES: [&str; 8] = ["host", "node", "source", "cluster", "doors", "docker", "crio", "nowhere"];
/// Variables that one block sets and another reads.
const VARIABLES: [&str; 3] = ["CRI_CONFIG_FILE", "POD", "CONTAINER"];

/// The blocks of a page.
#[derive(Debug, Default)]
pub struct Page {
    blocks: Vec<Block>,
    files: Vec<(String, String)>,
}

#[derive(Debug, PartialEq, Eq)]
struct Block {
    place: String,
    name: String,
    text: String,
}

impl Page {
    /// Reads a page of `docs`.
    pub fn read(name: &str) -> Result<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| name.to_owned())
    }

    /// Parses a page. A block of `sh` without a comment, and a comment without a block, are errors.
    pub fn parse(text: &str) -> Result<Self> {
        let mut page = Self::default();
        let mut comment: Option<(&str, &str)> = None;
        let mut lines = text.lines().enumerate();
        while let Some((number, line)) = lines.next() {
            let at = || format!("line {}: {line}", number + 1);
            let language = line.strip_prefix("```");
            if let (Some((left, _)), None) = (comment, language) {
                bail!("{}: a block was expected after the comment {left:?}", at());
            }
            if let Some(words) = line.strip_prefix("<!-- ").and_then(|line| line.strip_suffix(" -->")) {
                comment = Some(words.split_once(": ").with_context(|| at() + ": no `PLACE: NAME`")?);
            }
            let Some(language) = language else { continue };
            let text: String = lines
                .by_ref()
                .map(|(_, line)| line)
                .take_while(|line| *line != "```")
                .map(|line| format!("{line}\n"))
                .collect();
            match (comment.take(), language) {
                (Some(("file", name)), language) if language != "sh" => {
                    page.files.push((name.to_owned(), text))
                }
                (Some((place, name)), "sh") if PLACES.contains(&place) => {
                    page.blocks.push(Block { place: place.to_owned(), name: name.to_owned(), text });
                }
                (None, language) if language != "sh" => {}
                (comment, _) => bail!("{}: {comment:?} is not one of {PLACES:?}, or a file", at()),
            }
        }
        ensure!(comment.is_none(), "{comment:?} has no block");
        Ok(page)
    }

    /// Prepares the blocks of a place for a run in `dir`, to which the page's files are written.
    pub fn at(&self, place: &str, dir: &Path) -> Result<Visit<'_>> {
        for (name, text) in &self.files {
            fs::write(dir.join(name), text).with_context(|| format!("cannot write {name}"))?;
        }
        let left: Vec<_> = self.blocks.iter().filter(|block| block.place == place).collect();
        ensure!(!left.is_empty(), "the page has no block for {place}");
        let variables_file = dir.join(".variables");
        Ok(Visit { left: left.into_iter(), dir: dir.to_owned(), variables_file, env: Vec::new() })
    }
}

/// The blocks of one place, as they are run one after the other.
#[derive(Debug)]
pub struct Visit<'a> {
    left: std::vec::IntoIter<&'a Block>,
    dir: PathBuf,
    /// The variables of the block before.
    variables_file: PathBuf,
    env: Vec<(String, String)>,
}

impl Visit<'_> {
    /// Sets a variable of the reader's shell.
    pub fn set(&mut self, name: &str, value: impl Into<String>) {
        self.env.push((name.to_owned(), value.into()));
    }

    /// Changes to another directory.
    pub fn enter(&mut self, dir: &Path) {
        self.dir = dir.to_owned();
    }

    /// Runs the next block, which must have this name, and returns its output. The block fails with its first command that fails.
    pub fn run(&mut self, name: &str) -> Result<String> {
        let block = self.left.next().with_context(|| format!("the page has no block {name:?} any more"))?;
        ensure!(block.name == name, "the page goes on with {:?}, and the test with {name:?}", block.name);
        self.shell(&block.text).with_context(|| format!("the block {name:?}"))
    }

    /// Runs a command as if the reader had typed it.
    pub fn shell(&self, text: &str) -> Result<String> {
        let script = format!(
            "set -euo pipefail\n[[ ! -e {variables_file} ]] || . {variables_file}\n{text}\n\
             for name in {names}; do [[ -z ${{!name:-}} ]] || printf 'export %s=%q\\n' \"$name\" \"${{!name}}\"; done >{variables_file}\n",
            variables_file = self.variables_file.display(),
            names = VARIABLES.join(" ")
        );
        let output = Command::new("bash")
            .args(["-c", &script])
            .current_dir(&self.dir)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .output()
            .context("cannot run bash")?;
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {text}{stdout}{stderr}", output.status);
        Ok(stdout)
    }

    /// Checks that all blocks were run.
    pub fn end(mut self) -> Result<()> {
        match self.left.next() {
            Some(block) => bail!("the test does not run the block {:?}:\n{}", block.name, block.text),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_of_the_first_hour_has_its_place() {
        let page = Page::read("first-hour.md").unwrap();
        for place in PLACES {
            assert!(page.blocks.iter().any(|block| block.place == place), "nothing for {place}");
        }
        let names: Vec<_> = page.files.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["crictl.yaml", "pod.json", "container.json"]);
        for (name, text) in page.files.iter().filter(|(name, _)| name.ends_with(".json")) {
            serde_json::from_str::<serde_json::Value>(text).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    #[test]
    fn a_block_without_a_place_is_refused() {
        for page in [
            "```sh\ntrue\n```\n",
            "<!-- node: a -->\n\n```sh\ntrue\n```\n",
            "<!-- moon: a -->\n```sh\ntrue\n```\n",
            "<!-- file: a.json -->\n```sh\ntrue\n```\n",
            "<!-- node: a -->\nwords\n",
        ] {
            assert!(Page::parse(page).is_err(), "{page}");
        }
    }

    #[test]
    fn blocks_run_in_order_and_keep_variables() {
        let page = "<!-- node: one -->\n```sh\nPOD=$(cat a.txt)\n```\n<!-- file: a.txt -->\n```text\nit's x\n```\n\
                    <!-- node: two -->\n```sh\necho \"$POD\"\n```\n<!-- node: three -->\n```sh\nfalse\necho on\n```\n";
        let page = Page::parse(page).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut visit = page.at("node", dir.path()).unwrap();
        assert!(page.at("cluster", dir.path()).is_err());
        assert_eq!(visit.run("one").unwrap(), "");
        assert_eq!(visit.run("two").unwrap(), "it's x\n");
        assert!(visit.run("three").unwrap_err().to_string().contains("three"));
        visit.end().unwrap();
        let mut visit = page.at("node", dir.path()).unwrap();
        assert!(visit.run("two").is_err(), "out of order");
        assert!(visit.end().is_err(), "not all");
    }
}
