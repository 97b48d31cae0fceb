//! Parser for hackbench of rt-tests.

use super::text::number_after;
use super::{Figures, OutputError};

/// Parses a line "Time: 0.103".
pub fn parse(text: &str) -> Result<Figures, OutputError> {
    Ok(Figures::from([("time_s".into(), number_after(text, "Time:")?)]))
}

#[cfg(test)]
mod tests {
    use super::super::{Format, example};
    use super::*;

    #[test]
    fn the_time_is_in_seconds() {
        assert_eq!(parse(example(Format::Hackbench)).unwrap()["time_s"], 0.103);
    }
}
