//! Points at which tests kill this process, to test the recovery by the next one, or at which an operation fails. They
//! exist only in builds with the feature `failpoints`; in all others [`pass`] and [`fail`] do nothing.
//!
//! The directory that `SANDBOXER_FAILPOINTS` names holds these files. `armed` has one point per line: each worker
//! removes the first line and dies when it reaches that point. `passed` gets the name of every point that workers
//! reach, in the order of their first passes. `died` gets the name of the last point at which a worker has died. The
//! optional file `clock` has the number of seconds by which the wall clock is wrong. The optional file `streams`, read
//! at the worker's start, has the number of streams of a session with a guest.

use std::{fmt, future::Future, io, path::Path, time::SystemTime};

/// Passes a point. Its name is the event that has happened, or is about to.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn pass(_: fmt::Arguments<'_>) {}

/// Passes a point. Its name is the event that has happened, or is about to.
#[cfg(feature = "failpoints")]
pub fn pass(point: fmt::Arguments<'_>) {
    if let Some(points) = &*armed::POINTS {
        points.pass(point.to_string());
    }
}

/// Passes a point like [`pass`]. A test of the same process can make it never return for work on `of`, so that the work ends
/// there when its task is dropped.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn reach(_: fmt::Arguments<'_>, _: &Path) -> impl Future<Output = ()> + Send + use<> {
    std::future::ready(())
}

/// Passes a point like [`pass`]. A test of the same process can make it never return for work on `of`, so that the work ends
/// there when its task is dropped.
#[cfg(feature = "failpoints")]
pub fn reach(point: fmt::Arguments<'_>, of: &Path) -> impl Future<Output = ()> + Send + use<> {
    let is_held = injected::holds(&format!("{point}: {}", of.display()));
    pass(point);
    async move {
        if is_held {
            std::future::pending().await
        }
    }
}

/// Fails at a point if a test wants that: the armed line, which counts once, is the error's number, a space, and how the
/// point begins; or a test of the same process has injected an error. The point is the operation about to be done, and
/// with what.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn fail(_: fmt::Arguments<'_>) -> io::Result<()> {
    Ok(())
}

/// Fails at a point if a test wants that: the armed line, which counts once, is the error's number, a space, and how the
/// point begins; or a test of the same process has injected an error. The point is the operation about to be done, and
/// with what.
#[cfg(feature = "failpoints")]
pub fn fail(point: fmt::Arguments<'_>) -> io::Result<()> {
    let point = point.to_string();
    let errno = armed::POINTS.as_ref().and_then(|points| points.errno(&point));
    errno.or_else(|| injected::at(&point)).map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
}

#[cfg(feature = "failpoints")]
pub use injected::{Injection, hold, inject};

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

/// Returns the number of streams of a session with a guest, which is `usual` unless a test wants fewer.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub fn streams(usual: u32) -> u32 {
    usual
}

/// Returns the number of streams of a session with a guest, which is `usual` unless a test wants fewer.
#[cfg(feature = "failpoints")]
pub fn streams(usual: u32) -> u32 {
    armed::POINTS.as_ref().and_then(|points| points.streams).unwrap_or(usual)
}

#[cfg(feature = "failpoints")]
mod injected {
    use std::sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    };

    struct Armed {
        number: u64,
        point: &'static str,
        part: String,
        /// The error; `None`: work is held there.
        errno: Option<i32>,
        left: usize,
    }

    // The lock is held for a look-up, never across an await.
    static ARMED: Mutex<Vec<Armed>> = Mutex::new(Vec::new());
    static NEXT: AtomicU64 = AtomicU64::new(0);

    /// An injected error, which lasts until this is dropped.
    #[derive(Debug)]
    #[must_use]
    pub struct Injection(u64);

    impl Injection {
        /// Returns whether the error has occurred as often as it should.
        pub fn is_used_up(&self) -> bool {
            let armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
            armed.iter().all(|armed| armed.number != self.0 || armed.left == 0)
        }
    }

    impl Drop for Injection {
        fn drop(&mut self) {
            ARMED.lock().unwrap_or_else(PoisonError::into_inner).retain(|armed| armed.number != self.0);
        }
    }

    /// Makes the next `times` passes of points that begin with `point` and contain `part` fail with `errno`: several
    /// tests run in one process, each with paths of its own.
    pub fn inject(point: &'static str, part: &str, errno: i32, times: usize) -> Injection {
        arm(point, part, Some(errno), times)
    }

    /// Makes the next [`reach`](super::reach) of such a point, by work on what contains `part`, never return.
    pub fn hold(point: &'static str, part: &str) -> Injection {
        arm(point, part, None, 1)
    }

    fn arm(point: &'static str, part: &str, errno: Option<i32>, times: usize) -> Injection {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let armed = Armed { number, point, part: part.to_owned(), errno, left: times };
        ARMED.lock().unwrap_or_else(PoisonError::into_inner).push(armed);
        Injection(number)
    }

    pub fn at(point: &str) -> Option<i32> {
        hit(point, false)?
    }

    pub fn holds(point: &str) -> bool {
        hit(point, true).is_some()
    }

    fn hit(point: &str, is_held: bool) -> Option<Option<i32>> {
        let mut armed = ARMED.lock().unwrap_or_else(PoisonError::into_inner);
        let is_hit = |armed: &&mut Armed| {
            armed.left > 0
                && armed.errno.is_none() == is_held
                && point.starts_with(armed.point)
                && point.contains(armed.part.as_str())
        };
        let hit = armed.iter_mut().find(is_hit)?;
        hit.left -= 1;
        Some(hit.errno)
    }
}

#[cfg(feature = "failpoints")]
mod armed {
    use std::{
        collections::HashSet,
        fs,
        io::{self, Write},
        path::PathBuf,
        sync::{
            LazyLock, Mutex, PoisonError,
            atomic::{AtomicBool, Ordering},
        },
        time::{Duration, Instant, SystemTime},
    };

    /// The minimum life of a worker: the front restarts one that ran for a second without a pause.
    const LIFE: Duration = Duration::from_millis(1100);

    pub struct Points {
        dir: PathBuf,
        since: Instant,
        armed: Option<String>,
        /// Whether the armed error has occurred.
        has_failed: AtomicBool,
        pub streams: Option<u32>,
        // The lock is held while a line is written, never across an await.
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
            let streams =
                fs::read_to_string(dir.join("streams")).ok().and_then(|text| text.trim().parse().ok());
            let has_failed = AtomicBool::new(false);
            Ok(Self { dir, since: Instant::now(), armed, has_failed, streams, passed })
        }

        pub fn shifted(&self, now: SystemTime) -> SystemTime {
            let text = fs::read_to_string(self.dir.join("clock")).unwrap_or_default();
            let seconds: i64 = text.trim().parse().unwrap_or_default();
            let by = Duration::from_secs(seconds.unsigned_abs());
            if seconds < 0 { now - by } else { now + by }
        }

        pub fn errno(&self, point: &str) -> Option<i32> {
            let (errno, of) = self.armed.as_ref()?.split_once(' ')?;
            let errno = errno.parse().ok()?;
            (point.starts_with(of) && !self.has_failed.swap(true, Ordering::Relaxed)).then_some(errno)
        }

        #[expect(clippy::disallowed_methods, reason = "it waits for time to pass, and then dies")]
        pub fn pass(&self, point: String) {
            if self.armed.as_ref() == Some(&point) {
                std::thread::sleep(LIFE.saturating_sub(self.since.elapsed()));
                let _ = fs::write(self.dir.join("died"), &point);
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
