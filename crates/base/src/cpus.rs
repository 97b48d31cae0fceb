//! Sets of the host's CPUs and of its memory nodes, in the format of the kernel, control groups and CRI: `0-3,7`.

use std::{collections::BTreeSet, fmt};

/// The maximum number of CPUs in Linux.
const MAX_CPUS: u32 = 8192;

/// A set of CPUs or of memory nodes, never empty.
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

    /// Returns the set with this one member; `None` if it exceeds the kernel's maximum.
    pub fn one(member: u32) -> Option<Self> {
        (member < MAX_CPUS).then(|| Self(BTreeSet::from([member])))
    }

    /// Returns the members that are not in `other`; `None` if there are none.
    pub fn without(&self, other: Option<&Cpus>) -> Option<Self> {
        let is_other = |cpu: &u32| other.is_some_and(|other| other.0.contains(cpu));
        let rest: BTreeSet<u32> = self.0.iter().copied().filter(|cpu| !is_other(cpu)).collect();
        (!rest.is_empty()).then_some(Self(rest))
    }

    /// Returns whether all members are in `other`.
    pub fn is_within(&self, other: &Cpus) -> bool {
        self.0.is_subset(&other.0)
    }

    /// Returns the number of members, at least 1.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the members in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// Returns the union of the sets. `None`, which means all CPUs, if there are no sets or one is missing.
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

    #[test]
    fn sets_are_compared_and_reduced() {
        let set = |list| Cpus::parse(list).unwrap();
        assert_eq!(set("0-3").without(Some(&set("0,7"))), Some(set("1-3")));
        assert_eq!(set("0-3").without(None), Some(set("0-3")));
        assert_eq!(set("0-3").without(Some(&set("0-7"))), None);
        assert!(set("1,3").is_within(&set("0-3")) && !set("1,4").is_within(&set("0-3")));
        assert_eq!((set("0-3,7").count(), Cpus::one(5), Cpus::one(MAX_CPUS)), (5, Some(set("5")), None));
    }
}
