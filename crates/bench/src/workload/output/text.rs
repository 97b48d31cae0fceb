//! Numbers in lines of text.

use sandboxer_probe::log::plain;

use super::OutputError;

/// Returns the text after `label` in the first line that begins with it, without leading white space. Ignores a last
/// line without a newline, which may be incomplete.
pub fn after<'a>(text: &'a str, label: &'static str) -> Result<&'a str, OutputError> {
    whole_lines(text)
        .find_map(|line| line.trim_start().strip_prefix(label))
        .map(str::trim)
        .ok_or(OutputError::Missing(label))
}

/// Returns the lines that end with a newline.
pub fn whole_lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'))
}

/// Returns the number that begins a text, up to white space.
pub fn number(what: &'static str, text: &str) -> Result<f64, OutputError> {
    let word = text.split_whitespace().next().unwrap_or_default();
    word.parse()
        .ok()
        .filter(|number: &f64| number.is_finite() && *number >= 0.0)
        .ok_or_else(|| OutputError::Number { what, found: plain(word) })
}

/// Returns the number after `label`.
pub fn number_after(text: &str, label: &'static str) -> Result<f64, OutputError> {
    number(label, after(text, label)?)
}

/// Returns an error if rate and time contradict the count by more than 2 %: a count may have been mistaken for the
/// rate.
pub fn check_rate(rate: f64, seconds: f64, count: f64) -> Result<(), OutputError> {
    if (rate * seconds - count).abs() <= 0.02 * count.max(1.0) {
        return Ok(());
    }
    Err(OutputError::Contradiction(format!("{rate} per second in {seconds} s are not {count}")))
}
