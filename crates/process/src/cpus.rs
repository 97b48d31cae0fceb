//! Sets of the host's CPUs, as control groups and CRI write them: `0-3,7`.

use std::{collections::BTreeSet, fmt};

/// Maximum number of CPUs in Linux.
const MAX_CPUS: u32 = 8192;

/// A set of CPUs, never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpus(BTreeSet<u32>);

impl Cpus {
    /// Parses a list; `None` if it is invalid or empty.
    pub fn parse(list: &str) -> Option<Self> {
        let mut set = BTreeSet::new();
        for part in list.trim().split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            if first > last || last >= MAX_CPUS {
                return None;
            }
            set.extend(first..=last);
        }
        (!set.is_empty()).then_some(Self(set))
    }

    /// Returns the union of the sets; `None`, meaning all CPUs, without sets or if one is missing.
    pub fn union(sets: impl IntoIterator<Item = Option<Cpus>>) -> Option<Self> {
        let all = sets.into_iter().collect::<Option<Vec<_>>>()?;
        let union: BTreeSet<u32> = all.into_iter().flat_map(|cpus| cpus.0).collect();
        (!union.is_empty()).then_some(Self(union))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(first) = rest.next() {
            let mut last = first;
            while let Some(next) = rest.next_if_eq(&(last + 1)) {
                last = next;
            }
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}-{last}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written_as_the_kernel_does() {
        for (list, written) in [("0", "0"), ("0-3", "0-3"), ("7,0-1,2\n", "0-2,7"), ("1,3,5", "1,3,5")] {
            assert_eq!(Cpus::parse(list).unwrap().to_string(), written);
        }
        for bad in ["", ",", "3-1", "x", "-1", "0-8192", "0,,1"] {
            assert_eq!(Cpus::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_container_without_a_set_may_run_anywhere() {
        let set = Cpus::parse;
        assert_eq!(Cpus::union([set("0-1"), set("4")]), set("0-1,4"));
        assert_eq!(Cpus::union([set("0-1"), None]), None);
        assert_eq!(Cpus::union([]), None);
    }
}
