//! Small files that are created, read, appended to and deleted, as on a mail server. The mix is PostMark's default:
//! each transaction reads a file or appends to one, and creates a file or deletes one. PostMark itself only counts
//! whole seconds.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};

use crate::result::{Line, Times};

/// Number of subdirectories, so that no directory is large.
const DIRECTORIES: u64 = 10;

/// Measure creating, reading, appending to and deleting small files in the current directory
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Duration, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Number of files at the begin
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(2..=1_000_000))]
    files: u64,
    /// Smallest size of a new file, bytes
    #[arg(long, default_value_t = 512)]
    min: usize,
    /// Largest size of a new file, bytes
    #[arg(long, default_value_t = 16_384)]
    max: usize,
}

/// Measures and prints. The time includes writing everything to the disk at the end.
pub fn run(args: &Args) -> Result<()> {
    measure(args, Path::new("."))?.print()
}

fn measure(args: &Args, parent: &Path) -> Result<Line> {
    ensure!(
        0 < args.min && args.min <= args.max && args.max <= 1 << 30,
        "--min and --max are no range of sizes"
    );
    let dir = parent.join(format!("bench-mixed-{}", std::process::id()));
    let measured = Pool::create(&dir, args).and_then(|pool| pool.measure(args.seconds));
    let removed = fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()));
    let line = measured?;
    removed?;
    Ok(line)
}

/// The existing files.
struct Pool<'a> {
    args: &'a Args,
    dir: PathBuf,
    names: Vec<PathBuf>,
    data: Vec<u8>,
    random: SmallRng,
    created: u64,
    read: u64,
    written: u64,
}

impl<'a> Pool<'a> {
    fn create(dir: &Path, args: &'a Args) -> Result<Self> {
        let mut random = SmallRng::seed_from_u64(42);
        let mut data = vec![0; args.max];
        random.fill_bytes(&mut data);
        for part in 0..DIRECTORIES {
            let path = dir.join(part.to_string());
            fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        let (names, created, read, written) = Default::default();
        let mut pool = Self { args, dir: dir.to_owned(), names, data, random, created, read, written };
        for _ in 0..args.files {
            pool.add()?;
        }
        pool.sync()?;
        pool.written = 0;
        Ok(pool)
    }

    fn measure(mut self, seconds: f64) -> Result<Line> {
        let limit = Duration::try_from_secs_f64(seconds).context("--seconds is no duration")?;
        let (mut times, mut count, begun) = (Times::new()?, 0_u64, Instant::now());
        while begun.elapsed() < limit {
            let at = Instant::now();
            self.transaction()?;
            times.add(at.elapsed());
            count += 1;
        }
        let at = Instant::now();
        self.sync()?;
        let (sync, took) = (at.elapsed(), begun.elapsed().as_secs_f64());
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20) / took;
        Ok(Line::new("mixed")
            .figure("per_s", count as f64 / took)
            .figure("read_mib_per_s", mib(self.read))
            .figure("written_mib_per_s", mib(self.written))
            .figure("p50_us", times.percentile(50.0) / 1e3)
            .figure("p99_us", times.percentile(99.0) / 1e3)
            .figure("sync_ms", sync.as_secs_f64() * 1e3))
    }

    fn transaction(&mut self) -> Result<()> {
        let file = self.names[self.random.random_range(0..self.names.len())].clone();
        if self.random.random() {
            let mut bytes = Vec::new();
            self.read +=
                at_path(&file, File::open(&file).and_then(|mut file| file.read_to_end(&mut bytes)))? as u64;
        } else {
            let size = self.size();
            let appended = OpenOptions::new()
                .append(true)
                .open(&file)
                .and_then(|mut file| file.write_all(&self.data[..size]));
            at_path(&file, appended)?;
            self.written += size as u64;
        }
        // The number of files neither grows without bound nor falls to zero.
        let few = self.names.len() as u64 <= self.args.files / 2;
        if few || (self.random.random() && (self.names.len() as u64) < 2 * self.args.files) {
            return self.add();
        }
        let index = self.random.random_range(0..self.names.len());
        let file = self.names.swap_remove(index);
        at_path(&file, fs::remove_file(&file))
    }

    fn add(&mut self) -> Result<()> {
        self.created += 1;
        let file = self.dir.join((self.created % DIRECTORIES).to_string()).join(self.created.to_string());
        let size = self.size();
        at_path(&file, fs::write(&file, &self.data[..size]))?;
        self.written += size as u64;
        self.names.push(file);
        Ok(())
    }

    fn size(&mut self) -> usize {
        self.random.random_range(self.args.min..=self.args.max)
    }

    fn sync(&self) -> Result<()> {
        let file = at_path(&self.dir, File::open(&self.dir))?;
        rustix::fs::syncfs(file)
            .with_context(|| format!("cannot write all of {} to the disk", self.dir.display()))
    }
}

fn at_path<T>(path: &Path, result: std::io::Result<T>) -> Result<T> {
    result.with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> Args {
        Args { seconds: 0.05, files: 20, min: 10, max: 100 }
    }

    #[test]
    fn transactions_are_counted_and_nothing_is_left() {
        let parent = tempfile::tempdir().unwrap();
        let line = serde_json::to_value(measure(&args(), parent.path()).unwrap()).unwrap();
        for name in ["per_s", "read_mib_per_s", "written_mib_per_s", "p50_us", "sync_ms"] {
            assert!(line["metrics"][name].as_f64().unwrap() > 0.0, "{line}");
        }
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_number_of_files_stays_near_its_begin() {
        let (parent, args) = (tempfile::tempdir().unwrap(), args());
        let mut pool = Pool::create(parent.path(), &args).unwrap();
        for _ in 0..2000 {
            pool.transaction().unwrap();
            assert!((10..=40).contains(&pool.names.len()), "{}", pool.names.len());
        }
    }

    #[test]
    fn sizes_that_are_no_range_are_refused() {
        let parent = tempfile::tempdir().unwrap();
        let error = measure(&Args { min: 9, max: 3, ..args() }, parent.path()).unwrap_err();
        assert!(error.to_string().contains("--min"), "{error}");
    }
}
