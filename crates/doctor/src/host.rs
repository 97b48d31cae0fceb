//! The host's files.

use std::{
    ffi::OsStr,
    fs,
    io::{self, Read},
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

/// Maximum bytes read of a kernel file or a configuration.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The directories `/proc`, `/sys`, `/dev` and `/etc` below a root: this host's, or a test's.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self::below("/")
    }
}

impl Host {
    /// Returns a host with its files below `root`.
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the location of the file with this absolute path.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns the text of a file, trimmed; at most 1 MiB.
    pub fn text(&self, path: impl AsRef<Path>) -> io::Result<String> {
        let mut bytes = Vec::new();
        fs::File::open(self.path(path))?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// Returns the number that a file contains.
    pub fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path).ok()?.parse().ok()
    }

    /// Returns the names in a directory, sorted; empty if the directory does not exist.
    pub fn names(&self, dir: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(dir)).into_iter().flatten().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Checks that a character device exists and can be opened.
    pub fn device(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let path = self.path(path);
        if !fs::metadata(&path)?.file_type().is_char_device() {
            return Err(io::Error::other("not a device"));
        }
        fs::OpenOptions::new().read(true).write(true).open(path).map(drop)
    }

    /// Returns the path of a program, which is an absolute path or a name in `search`, a list as in `PATH`.
    pub fn program(&self, program: &Path, search: &OsStr) -> Option<PathBuf> {
        use std::os::unix::fs::PermissionsExt;
        let runs = |path: &PathBuf| {
            fs::metadata(self.path(path)).is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
        };
        if program.is_absolute() {
            return Some(program.to_owned()).filter(runs);
        }
        std::env::split_paths(search).map(|dir| dir.join(program)).find(runs)
    }
}

/// Returns the value of `key` in lines such as `MemFree:   12 kB`: the first word, as a number.
pub(super) fn field(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    value.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_those_below_the_root() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/sys")).unwrap();
        fs::write(root.path().join("proc/sys/max"), "12\n").unwrap();
        let host = Host::below(root.path());
        assert_eq!(host.number("/proc/sys/max"), Some(12));
        assert_eq!(host.names("/proc/sys"), ["max"]);
        assert_eq!(host.text("/proc/none").unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(host.device("/proc/sys/max").unwrap_err().to_string(), "not a device");
        assert_eq!(host.program("max".as_ref(), "/proc/sys".as_ref()), None, "it is not executable");
        assert_eq!(Host::default().program("sh".as_ref(), "/bin".as_ref()).unwrap(), Path::new("/bin/sh"));
    }

    #[test]
    fn a_file_without_end_is_read_to_the_bound() {
        assert_eq!(Host::default().text("/dev/zero").unwrap().len() as u64, MAX_FILE_BYTES);
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "MemTotal:  9 kB\nMemAvailable:   7 kB\n";
        assert_eq!(
            (field(text, "MemAvailable"), field(text, "Mem"), field(text, "Swap")),
            (Some(7), None, None)
        );
    }
}
