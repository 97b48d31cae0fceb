//! Progress bars.

use indicatif::{ProgressBar, ProgressStyle};

/// Returns a progress bar on stderr, shown only on a terminal. Each step has the same length.
pub fn steps(count: u64) -> ProgressBar {
    bar(count, "{bar:30} {pos}/{len} {msg}, {eta} left")
}

/// Returns a progress bar whose unit is time, for a good estimate from the first step on.
pub fn time(ms: u64) -> ProgressBar {
    bar(ms, "{bar:30} {percent} % {msg}, {eta} left")
}

fn bar(length: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template);
    ProgressBar::new(length).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
