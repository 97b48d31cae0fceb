//! Formats numbers, times and tables as text.

use std::io::{self, IsTerminal};

use comfy_table::{ContentArrangement, Row, Table, presets};
use jiff::{Timestamp, Unit, tz::TimeZone};
pub use sandboxer_command::output::{Plain, plain, print, print_json};

/// Number of characters of an id in a table; containerd's ids differ much earlier.
const SHORT_ID: usize = 13;

/// Number of columns below which wrapping makes a table unreadable.
const MIN_WIDTH: u16 = 40;

/// Returns a table without lines. On a terminal, long cells wrap so that the table fits; elsewhere every row is one
/// line, for `grep` and `awk`.
pub fn table<R: Into<Row>>(header: impl Into<Row>, rows: impl IntoIterator<Item = R>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header).add_rows(rows);
    let terminal = if io::stdout().is_terminal() { table.width() } else { None };
    if let Some(width) = usable_width(terminal) {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

/// Returns the terminal's columns if text fits into them. A serial console reports 0.
fn usable_width(columns: Option<u16>) -> Option<u16> {
    columns.filter(|columns| *columns >= MIN_WIDTH)
}

/// Returns the displayed prefix of an id.
pub fn short(id: &str) -> String {
    plain(&id.chars().take(SHORT_ID).collect::<String>())
}

/// Formats the time since `at_ns` (ns since 1970) in its two largest units: `3m12s`. `-` for 0.
pub fn age(at_ns: u64) -> String {
    if at_ns == 0 {
        return "-".into();
    }
    let now = Timestamp::now().as_nanosecond();
    let seconds = u64::try_from((now - i128::from(at_ns)) / 1_000_000_000).unwrap_or(0);
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}m{}s", seconds % 60),
        3600..86_400 => format!("{hours}h{minutes}m"),
        _ => format!("{days}d{hours}h"),
    }
}

/// Formats a duration with three digits: `850 µs`, `12.3 ms`, `1.84 s`.
pub fn duration(ns: u64) -> String {
    // Each bound is where rounding to three digits would show 1000 of the unit.
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..999_500 => digits(ns as f64 / 1e3, "µs"),
        999_500..999_500_000 => digits(ns as f64 / 1e6, "ms"),
        _ => digits(ns as f64 / 1e9, "s"),
    }
}

/// Formats a size in the largest unit that fits.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let size = |power: usize| count as f64 / 1024_f64.powi(power as i32);
    match (1..=UNITS.len()).rfind(|power| size(*power) >= 1.0) {
        None => format!("{count} B"),
        Some(power) => format!("{:.1} {}", size(power), UNITS[power - 1]),
    }
}

/// Formats a size of `mib` MiB: `256 MiB`, `1.50 GiB`.
pub fn mib(mib: u64) -> String {
    if mib < 1024 { format!("{mib} MiB") } else { digits(mib as f64 / 1024.0, "GiB") }
}

fn digits(value: f64, unit: &str) -> String {
    let decimals = match value {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

/// Formats a time (ns since 1970) in this host's time zone, to the millisecond. `-` for 0.
pub fn time(at_ns: u64) -> String {
    if at_ns == 0 {
        return "-".into();
    }
    let zoned = Timestamp::from_nanosecond(i128::from(at_ns))
        .and_then(|at| at.round(Unit::Millisecond))
        .map(|at| at.to_zoned(TimeZone::system()));
    match zoned {
        Ok(zoned) => zoned.strftime("%Y-%m-%d %H:%M:%S%.3f").to_string(),
        Err(_) => format!("{at_ns} ns since 1970"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_that_does_not_know_its_width_has_none() {
        assert_eq!([None, Some(0), Some(1), Some(39)].map(usable_width), [None; 4]);
        assert_eq!(
            [Some(40), Some(80), Some(u16::MAX)].map(usable_width),
            [Some(40), Some(80), Some(u16::MAX)]
        );
    }

    #[test]
    fn bytes_are_in_the_largest_unit_of_which_there_is_one() {
        assert_eq!([bytes(0), bytes(1023), bytes(1024)], ["0 B", "1023 B", "1.0 KiB"]);
        assert_eq!([bytes(3 << 29), bytes(5 << 50)], ["1.5 GiB", "5120.0 TiB"]);
    }

    #[test]
    fn durations_have_three_digits_also_where_units_meet() {
        let shown = |ns| duration(ns);
        assert_eq!(shown(0), "0 ns");
        assert_eq!(shown(1_000), "1.00 µs");
        assert_eq!(shown(12_345), "12.3 µs");
        assert_eq!(shown(999_499), "999 µs");
        assert_eq!(shown(999_500), "1.00 ms");
        assert_eq!(shown(9_994_999), "9.99 ms");
        assert_eq!(shown(9_996_000), "10.0 ms");
        assert_eq!(shown(1_840_000_000), "1.84 s");
        assert_eq!(shown(754_000_000_000), "754 s");
    }

    #[test]
    fn memory_changes_its_unit_at_a_gibibyte() {
        assert_eq!(mib(1023), "1023 MiB");
        assert_eq!(mib(1024), "1.00 GiB");
        assert_eq!(mib(1536), "1.50 GiB");
        assert_eq!(mib(1 << 20), "1024 GiB");
    }

    #[test]
    fn ages_show_two_units_and_a_clock_that_went_back_is_no_negative_age() {
        let now = u64::try_from(Timestamp::now().as_nanosecond()).unwrap();
        let ago = |seconds: u64| age(now - seconds * 1_000_000_000);
        assert_eq!(ago(0), "0s");
        assert!(["3m12s", "3m13s"].contains(&ago(192).as_str()));
        assert_eq!(ago(2 * 3600 + 5 * 60 + 10), "2h5m");
        assert_eq!(ago(3 * 86_400 + 4 * 3600 + 10), "3d4h");
        assert_eq!(age(now + 60_000_000_000), "0s");
        assert_eq!(age(0), "-");
    }
}
