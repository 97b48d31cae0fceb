//! The clock that times are measured by: the wall clock, or the virtual clock of an emulated host.

use std::fs;

use serde::{Deserialize, Serialize};

/// Word on the kernel's command line of a host with virtual time.
const MARK: &str = "node.clock=virtual";

/// A clock. No ratio, table or plot mixes two clocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clock {
    /// The wall clock; also of results that name no clock.
    #[default]
    Wall,
    /// Time of an emulated host: one instruction takes one nanosecond, and waiting costs the host nothing.
    Virtual,
}

impl Clock {
    /// Both clocks.
    pub const ALL: [Self; 2] = [Clock::Wall, Clock::Virtual];

    /// Returns the clock of this host, from its kernel's command line.
    pub fn of_host() -> Self {
        Self::from_command_line(&fs::read_to_string("/proc/cmdline").unwrap_or_default())
    }

    fn from_command_line(command_line: &str) -> Self {
        if command_line.split_whitespace().any(|word| word == MARK) { Clock::Virtual } else { Clock::Wall }
    }

    /// Returns the clock's name in results and on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Clock::Wall => "wall",
            Clock::Virtual => "virtual",
        }
    }

    /// Returns the unit of the clock's times in tables and plots.
    pub const fn ms(self) -> &'static str {
        match self {
            Clock::Wall => "ms",
            Clock::Virtual => "virtual ms",
        }
    }
}

impl std::fmt::Display for Clock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Clock {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|clock| clock.as_str() == text)
            .ok_or_else(|| format!("no such clock '{text}': wall or virtual"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_says_by_its_command_line_that_its_time_is_virtual() {
        assert_eq!(Clock::from_command_line("console=ttyS0 node.clock=virtual quiet\n"), Clock::Virtual);
        for other in ["", "console=ttyS0 quiet", "node.clock=virtually", "xnode.clock=virtual"] {
            assert_eq!(Clock::from_command_line(other), Clock::Wall, "{other}");
        }
    }

    #[test]
    fn names_come_back_as_clocks() {
        for clock in Clock::ALL {
            assert_eq!(clock.as_str().parse(), Ok(clock));
        }
        assert!("sundial".parse::<Clock>().unwrap_err().contains("wall or virtual"));
    }
}
