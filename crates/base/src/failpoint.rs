//! Points at which a test has this process killed, to see what the next one makes of what it left. In builds with the
//! feature `failpoints`; in all others, [`pass`] is nothing.
//!
//! The directory that `SANDBOXER_FAILPOINTS` names holds two files. `armed` has one point a line: each worker takes
//! the first line away and dies when it comes by that point. `passed` gets the name of every point that workers
//! come by, in the order in which they first do. A third, `clock`, has the seconds by which the wall clock is wrong, if it
//! is there.

use std::{fmt, time::SystemTime};

/// Comes by a point. What is named is what has happened, or is about to.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn pass(_: fmt::Arguments<'_>) {}

/// Comes by a point. What is named is what has happened, or is about to.
#[cfg(feature = "failpoints")]
pub fn pass(point: fmt::Arguments<'_>) {
    if let Some(points) = &*armed::POINTS {
        points.pass(point.to_string());
    }
}

/// Returns what the wall clock shows.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn shifted(now: SystemTime) -> SystemTime {
    now
}

/// Returns what the wall clock shows.
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

    /// The front takes a worker that lives for a second for a sound one, and starts the next without a pause.
    const LIFE: Duration = Duration::from_millis(1100);

    pub struct Points {
        dir: PathBuf,
        since: Instant,
        armed: Option<String>,
        // Held for the writing of a line, never across an await.
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
