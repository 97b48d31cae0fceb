//! Points at which tests kill this process, to test the recovery by the next one. Only in builds with the
//! feature `failpoints`; in all others [`pass`] does nothing.
//!
//! The directory that `SANDBOXER_FAILPOINTS` names holds two files. `armed` has one point a line: each worker removes
//! the first line and dies when it reaches that point. `passed` gets the name of every point that workers
//! reach, in the order of their first passes. A third, optional one, `clock`, has the seconds by which the wall clock is
//! wrong.

use std::{fmt, time::SystemTime};

/// Passes a point. Its name is what has happened, or is about to.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn pass(_: fmt::Arguments<'_>) {}

/// Passes a point. Its name is what has happened, or is about to.
#[cfg(feature = "failpoints")]
pub fn pass(point: fmt::Arguments<'_>) {
    if let Some(points) = &*armed::POINTS {
        points.pass(point.to_string());
    }
}

/// Returns the wall clock's time.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn shifted(now: SystemTime) -> SystemTime {
    now
}

/// Returns the wall clock's time.
#[cfg(feature = "failpoints")]
pub fn shifted(now: SystemTime) -> SystemTime {
    armed::POINTS.as_ref().map_or(now, |points| points.shifted(now))
}

#[cfg(feature = "failpoints")]
mod armed {
    use std::{
        collections::HashSet,
        fs,
        io::{self, Write},
        path::PathBuf,
        sync::{LazyLock, Mutex, PoisonError},
        time::{Duration, Instant, SystemTime},
    };

    /// Minimum life of a worker: the front restarts one that ran for a second without a pause.
    const LIFE: Duration = Duration::from_millis(1100);

    pub struct Points {
        dir: PathBuf,
        since: Instant,
        armed: Option<String>,
        // Held while a line is written, never across an await.
        passed: Mutex<HashSet<String>>,
    }

    pub static POINTS: LazyLock<Option<Points>> = LazyLock::new(|| {
        let dir = PathBuf::from(std::env::var_os("SANDBOXER_FAILPOINTS")?);
        let points = Points::take(dir).inspect_err(|error| eprintln!("SANDBOXER_FAILPOINTS: {error}"));
        points.ok()
    });

    impl Points {
        fn take(dir: PathBuf) -> io::Result<Self> {
            let list = dir.join("armed");
            let text = fs::read_to_string(&list)?;
            let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
            fs::write(&list, rest)?;
            let armed = (!first.is_empty()).then(|| first.to_owned());
            let known = fs::read_to_string(dir.join("passed")).unwrap_or_default();
            let passed = Mutex::new(known.lines().map(str::to_owned).collect());
            Ok(Self { dir, since: Instant::now(), armed, passed })
        }

        pub fn shifted(&self, now: SystemTime) -> SystemTime {
            let text = fs::read_to_string(self.dir.join("clock")).unwrap_or_default();
            let seconds: i64 = text.trim().parse().unwrap_or_default();
            let by = Duration::from_secs(seconds.unsigned_abs());
            if seconds < 0 { now - by } else { now + by }
        }

        pub fn pass(&self, point: String) {
            if self.armed.as_ref() == Some(&point) {
                std::thread::sleep(LIFE.saturating_sub(self.since.elapsed()));
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
            let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
            if !passed.contains(&point) {
                let file = fs::OpenOptions::new().create(true).append(true).open(self.dir.join("passed"));
                let written = file.and_then(|mut file| file.write_all(format!("{point}\n").as_bytes()));
                if let Err(error) = written {
                    eprintln!("SANDBOXER_FAILPOINTS: {error}");
                }
                passed.insert(point);
            }
        }
    }
}
