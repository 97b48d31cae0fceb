//! Power of the host during a run: from the processors' own meters (RAPL), or from the file of a meter at the socket.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use sandboxer_probe::workload::run::Power;

/// Directory of the processors' meters in sysfs.
const POWERCAP: &str = "/sys/class/powercap";
/// Maximum size of a meter's file, bytes.
const LONGEST: u64 = 64 << 20;

/// A source of power figures.
#[derive(Debug, Clone)]
pub enum Meter {
    /// Energy counters of the processors' packages. They do not include the rest of the host.
    Rapl(Vec<Counter>),
    /// File to which a meter appends lines "time,watts", with the time in RFC 3339 or in seconds since 1970.
    File(PathBuf),
    /// No source, with the reason.
    None(String),
}

/// A counter of energy.
#[derive(Debug, Clone)]
pub struct Counter {
    path: PathBuf,
    /// Number of µJ after which the counter restarts at 0.
    range: u64,
}

/// Readings at the begin of a run.
#[derive(Debug, Clone)]
pub struct Begin {
    at: Timestamp,
    energy: Vec<Option<u64>>,
}

impl Meter {
    /// Returns the meter of this host, or the given file.
    pub fn find(file: Option<PathBuf>) -> Self {
        match file {
            Some(file) => Meter::File(file),
            None => Self::below(Path::new(POWERCAP)),
        }
    }

    /// Returns the package counters in a directory with the kernel's layout.
    fn below(dir: &Path) -> Self {
        let none = |why: &str| {
            Meter::None(format!("no meter: {why} {}; name a meter's file with --power-csv", dir.display()))
        };
        let Ok(entries) = fs::read_dir(dir) else { return none("there is no") };
        let zones = entries.flatten().map(|entry| entry.path());
        let packages =
            zones.filter(|zone| text(&zone.join("name")).is_ok_and(|name| name.starts_with("package")));
        let counter = |zone: PathBuf| {
            let path = zone.join("energy_uj");
            // Only root may read the counter.
            number(&path).ok()?;
            Some(Counter { path, range: number(&zone.join("max_energy_range_uj")).ok()? })
        };
        let counters: Vec<Counter> = packages.filter_map(counter).collect();
        if counters.is_empty() { none("no readable package in") } else { Meter::Rapl(counters) }
    }

    /// Reads the meter at the begin of a run.
    pub fn begin(&self) -> Begin {
        let energy = match self {
            Meter::Rapl(counters) => counters.iter().map(|counter| number(&counter.path).ok()).collect(),
            _ => Vec::new(),
        };
        Begin { at: Timestamp::now(), energy }
    }

    /// Returns the mean power since `begin`.
    pub fn since(&self, begin: &Begin) -> Power {
        let now = Timestamp::now();
        let measured = match self {
            Meter::Rapl(counters) => joules(counters, &begin.energy).map(|joules| {
                let seconds = now.duration_since(begin.at).as_secs_f64();
                (joules / seconds.max(1e-3), format!("RAPL, {} packages", counters.len()))
            }),
            Meter::File(path) => {
                let read = bounded(path).map_err(|error| format!("cannot read {}: {error}", path.display()));
                let of_run = read.and_then(|text| mean(&text, begin.at, now));
                of_run
                    .map(|watts| (watts, path.display().to_string()))
                    .map_err(|why| format!("{}: {why}", path.display()))
            }
            Meter::None(why) => Err(why.clone()),
        };
        match measured {
            Ok((watts, source)) => Power { watts: Some(watts), source },
            Err(why) => Power { watts: None, source: format!("not measured: {why}") },
        }
    }
}

fn text(path: &Path) -> io::Result<String> {
    Ok(fs::read_to_string(path)?.trim().to_owned())
}

fn number(path: &Path) -> io::Result<u64> {
    text(path)?.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is no number"))
}

fn joules(counters: &[Counter], before: &[Option<u64>]) -> Result<f64, String> {
    let mut sum = 0;
    for (counter, before) in counters.iter().zip(before) {
        let now = number(&counter.path).map_err(|error| format!("{}: {error}", counter.path.display()))?;
        let before = before.ok_or_else(|| format!("{}: unreadable at the begin", counter.path.display()))?;
        // A lower value means that the counter has restarted once.
        sum += if now >= before { now - before } else { now + counter.range.saturating_sub(before) };
    }
    Ok(sum as f64 / 1e6)
}

fn bounded(path: &Path) -> io::Result<String> {
    if fs::metadata(path)?.len() > LONGEST {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has more than {} MiB", LONGEST >> 20),
        ));
    }
    fs::read_to_string(path)
}

/// Returns the mean of the rows between two times. The last line may be incomplete: a meter may still be writing it.
fn mean(text: &str, from: Timestamp, to: Timestamp) -> Result<f64, String> {
    let mut rows = Vec::new();
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    for (index, line) in complete.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match row(line) {
            Some((at, watts)) if at >= from && at <= to => rows.push(watts),
            Some(_) => {}
            // The file may begin with a heading.
            None if index == 0 => {}
            None => {
                return Err(format!(
                    "line {} is not 'time,watts': '{}'",
                    index + 1,
                    sandboxer_probe::log::plain(line)
                ));
            }
        }
    }
    if rows.is_empty() {
        return Err(format!("it has no row between {from} and {to}"));
    }
    Ok(rows.iter().sum::<f64>() / rows.len() as f64)
}

fn row(line: &str) -> Option<(Timestamp, f64)> {
    let (at, watts) = line.split_once(',')?;
    let at = at.trim();
    let at = at.parse().ok().or_else(|| {
        let seconds: f64 = at.parse().ok()?;
        Timestamp::from_microsecond((seconds * 1e6) as i64).ok()
    })?;
    Some((at, watts.trim().parse::<f64>().ok().filter(|watts| watts.is_finite() && *watts >= 0.0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a copy of the kernel's directory with a package, and a part of the package that must not count twice.
    fn double(energy: u64) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (zone, name, energy) in [("intel-rapl:0", "package-0", energy), ("intel-rapl:0:0", "core", 7)] {
            let zone = dir.path().join(zone);
            fs::create_dir(&zone).unwrap();
            fs::write(zone.join("name"), format!("{name}\n")).unwrap();
            fs::write(zone.join("energy_uj"), energy.to_string()).unwrap();
            fs::write(zone.join("max_energy_range_uj"), "262143328850\n").unwrap();
        }
        dir
    }

    #[test]
    fn a_counter_of_energy_that_begins_again_is_no_loss() {
        let dir = double(262_143_328_850 - 1_000_000);
        let meter = Meter::below(dir.path());
        let begin = Begin { at: Timestamp::now() - jiff::SignedDuration::from_secs(2), ..meter.begin() };
        fs::write(dir.path().join("intel-rapl:0/energy_uj"), "3000000").unwrap();
        let power = meter.since(&begin);
        assert!((power.watts.unwrap() - 2.0).abs() < 0.1, "{power:?}");
        assert_eq!(power.source, "RAPL, 1 packages");
    }

    #[test]
    fn without_a_meter_there_is_no_figure_but_the_reason() {
        for meter in [Meter::below(Path::new("/no/such")), Meter::below(tempfile::tempdir().unwrap().path())]
        {
            let power = meter.since(&meter.begin());
            assert!(power.watts.is_none() && power.source.starts_with("not measured: no meter"), "{power:?}");
            assert!(power.source.contains("--power-csv"), "{power:?}");
        }
    }

    #[test]
    fn a_meters_rows_of_the_run_are_averaged() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let (from, to) = (at("2026-01-01T00:00:10Z"), at("2026-01-01T00:00:20Z"));
        let text = "time,watts\n2026-01-01T00:00:09Z,500\n2026-01-01T00:00:10Z,50\n1767225615.5, 70\n\
                    2026-01-01T00:00:21Z,500\n2026-01-01T00:00:20Z,9";
        assert_eq!(mean(text, from, to), Ok(60.0));
        assert!(mean("time,watts\n", from, to).unwrap_err().contains("no row between"));
        let broken = mean("time,watts\nnow,then\n", from, to).unwrap_err();
        assert!(broken.contains("line 2 is not 'time,watts': 'now,then'"), "{broken}");
        assert!(mean("1767225615,-3\n1767225615,NaN\n", from, to).is_err());
    }

    #[test]
    fn a_meters_file_that_is_missing_is_named() {
        let meter = Meter::find(Some("/no/such.csv".into()));
        let power = meter.since(&meter.begin());
        assert!(power.source.starts_with("not measured: /no/such.csv: cannot read"), "{power:?}");
    }
}
