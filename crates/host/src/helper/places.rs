//! Limits of the helpers that run and that hang, by namespace and file system.
//!
//! A tenant's volumes may hang as often as the tenant likes: each new pod has new paths. So hung helpers are counted by
//! Kubernetes namespace and file system, and take no place of other tenants.

use std::{collections::HashMap, io, path::Path, sync::Arc};

use procfs::{FromRead, process::MountInfos};

/// The most running helpers of the node. Each takes about 1 MiB.
pub const MAX_OF_NODE: usize = 256;
/// The part of these that is reserved for namespaces without a hung helper.
pub const RESERVE: usize = 64;
/// The most helpers of a namespace, running and hung.
pub const MAX_OF_NAMESPACE: usize = 64;
/// The most hung helpers of a namespace at one file system.
pub const MAX_OF_FILE_SYSTEM: usize = 8;

/// A namespace, and the device of a file system if it is known: "0:57".
pub type Namespace = Arc<str>;
pub type FileSystem = Option<String>;

/// The helpers that run or hang.
#[derive(Debug, Default)]
pub struct Places {
    running: usize,
    by_namespace: HashMap<Namespace, HelperCounts>,
}

#[derive(Debug, Default)]
struct HelperCounts {
    running: usize,
    hung: HashMap<FileSystem, usize>,
}

/// The limit that is reached.
#[derive(Debug, PartialEq, Eq)]
pub enum Full {
    FileSystem,
    Namespace,
    Node,
}

impl Full {
    /// Returns the limit, and its scope.
    pub fn limit(&self) -> (usize, &'static str) {
        match self {
            Self::FileSystem => (MAX_OF_FILE_SYSTEM, "this volume's file system"),
            Self::Namespace => (MAX_OF_NAMESPACE, "this pod's namespace"),
            Self::Node => (MAX_OF_NODE, "this node"),
        }
    }
}

impl HelperCounts {
    fn hung(&self) -> usize {
        self.hung.values().sum()
    }
}

impl Places {
    /// Returns whether a helper of the namespace hangs.
    pub fn hangs(&self, namespace: &Namespace) -> bool {
        self.by_namespace.get(namespace).is_some_and(|counts| counts.hung() > 0)
    }

    /// Takes a place for a helper that runs.
    pub fn take(&mut self, namespace: &Namespace, at: &FileSystem) -> Result<(), Full> {
        let none = HelperCounts::default();
        let counts = self.by_namespace.get(namespace).unwrap_or(&none);
        let hung = counts.hung();
        if at.is_some() && counts.hung.get(at).is_some_and(|hung| *hung >= MAX_OF_FILE_SYSTEM) {
            return Err(Full::FileSystem);
        }
        if counts.running + hung >= MAX_OF_NAMESPACE {
            return Err(Full::Namespace);
        }
        if self.running >= if hung > 0 { MAX_OF_NODE - RESERVE } else { MAX_OF_NODE } {
            return Err(Full::Node);
        }
        self.running += 1;
        self.by_namespace.entry(namespace.clone()).or_default().running += 1;
        Ok(())
    }

    /// Counts a running helper as a hung one.
    pub fn hang(&mut self, namespace: &Namespace, at: FileSystem) {
        self.running -= 1;
        let counts = self.by_namespace.entry(namespace.clone()).or_default();
        counts.running -= 1;
        *counts.hung.entry(at).or_default() += 1;
    }

    /// Frees the place of a helper that ran or, with the file system, hung.
    pub fn free(&mut self, namespace: &Namespace, hung_at: Option<&FileSystem>) {
        let Some(counts) = self.by_namespace.get_mut(namespace) else { return };
        match hung_at {
            None => {
                self.running -= 1;
                counts.running -= 1;
            }
            Some(at) => {
                if let Some(hung) = counts.hung.get_mut(at) {
                    *hung -= 1;
                }
                counts.hung.retain(|_, hung| *hung > 0);
            }
        }
        if counts.running == 0 && counts.hung.is_empty() {
            self.by_namespace.remove(namespace);
        }
    }
}

/// Returns the file system that is mounted at or above a path, without accessing the path.
pub fn file_system(path: &Path) -> FileSystem {
    // `/proc/self` will not do: another thread may have another mount namespace.
    let mounts = MountInfos::from_file("/proc/thread-self/mountinfo").map_err(io::Error::other).ok()?;
    // Of two mounts at one place, the last covers the other.
    let above = mounts.0.into_iter().filter(|mount| path.starts_with(&mount.mount_point));
    above.max_by_key(|mount| mount.mount_point.components().count()).map(|mount| mount.majmin)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(number: usize) -> FileSystem {
        Some(format!("0:{number}"))
    }

    #[test]
    fn what_hangs_of_one_namespace_takes_no_place_of_another() {
        let mut places = Places::default();
        let [bad, good] = ["bad", "good"].map(Namespace::from);
        // In a crash loop, each pod has a volume of its own that hangs.
        for number in 0..MAX_OF_NAMESPACE {
            places.take(&bad, &at(number)).unwrap();
            places.hang(&bad, at(number));
        }
        assert_eq!(places.take(&bad, &at(MAX_OF_NAMESPACE)), Err(Full::Namespace));
        assert!(places.hangs(&bad) && !places.hangs(&good));
        for _ in 0..MAX_OF_NAMESPACE {
            places.take(&good, &None).unwrap();
        }
        assert_eq!(places.take(&good, &None), Err(Full::Namespace));
        for number in 0..MAX_OF_NAMESPACE {
            places.free(&bad, Some(&at(number)));
            places.free(&good, None);
        }
        assert!(places.by_namespace.is_empty() && places.running == 0);
    }

    #[test]
    fn namespaces_that_hang_leave_places_to_those_that_do_not() {
        let mut places = Places::default();
        let names: Vec<Namespace> = (0..20).map(|number| format!("bad{number}").into()).collect();
        for bad in &names {
            places.take(bad, &None).unwrap();
            places.hang(bad, None);
        }
        let taken: usize = names
            .iter()
            .map(|bad| (0..MAX_OF_NAMESPACE).take_while(|_| places.take(bad, &None).is_ok()).count())
            .sum();
        assert_eq!(taken, MAX_OF_NODE - RESERVE);
        assert_eq!(places.take(&names[19], &None), Err(Full::Node));
        let good = Namespace::from("good");
        for _ in 0..RESERVE {
            places.take(&good, &None).unwrap();
        }
        assert_eq!(places.take(&Namespace::from("other"), &None), Err(Full::Node));
    }

    /// With one dead server under many pods of a namespace, the other volumes of the namespace still work.
    #[test]
    fn what_hangs_at_one_file_system_leaves_places_for_others() {
        let mut places = Places::default();
        let own = Namespace::from("own");
        for _ in 0..MAX_OF_FILE_SYSTEM {
            places.take(&own, &at(7)).unwrap();
            places.hang(&own, at(7));
        }
        assert_eq!(places.take(&own, &at(7)), Err(Full::FileSystem));
        places.take(&own, &at(8)).unwrap();
        places.take(&Namespace::from("another"), &at(7)).unwrap();
        places.free(&own, Some(&at(7)));
        places.take(&own, &at(7)).unwrap();
    }

    #[test]
    fn a_file_system_is_known_by_what_is_mounted_nearest() {
        let [proc, below, root] = ["/proc", "/proc/self/fd", "/"].map(|path| file_system(Path::new(path)));
        assert!(proc.is_some() && proc == below && proc != root, "{proc:?} {below:?} {root:?}");
    }
}
