//! The NUMA nodes that hold the memory of a process, and the move of its memory to another node.

use std::{collections::BTreeMap, fs, io};

use caps::{CapSet, Capability};
use sandboxer_base::Cpus;

/// The end of the name of a file that is memory: such files have no name in a file system.
const NAMELESS: &str = "\\040(deleted)";
/// Number of bits in a word of the kernel's node masks.
const WORD: usize = libc::c_ulong::BITS as usize;

/// The memory of a process by node, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Residence {
    /// The process's memory, including that of a template of which it is a copy: mappings without a file, of a file
    /// without a name, or with pages that the process has changed.
    pub memory: BTreeMap<u32, u64>,
    /// Files that the process only reads, such as its program. All processes of the host share them.
    pub files: BTreeMap<u32, u64>,
}

impl Residence {
    /// Reads the memory of process `pid`. The kernel walks the process's page tables: some ms per GiB.
    pub fn read(pid: u32) -> io::Result<Self> {
        Ok(Self::parse(&fs::read_to_string(format!("/proc/{pid}/numa_maps"))?))
    }

    /// Parses a `numa_maps`: one line per mapping.
    fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for line in text.lines() {
            let values = || line.split_ascii_whitespace().filter_map(|word| word.split_once('='));
            let value = |name: &str| values().find_map(|(key, value)| (key == name).then_some(value));
            let page_kib = value("kernelpagesize_kB").and_then(|kib| kib.parse().ok()).unwrap_or(4);
            let is_memory =
                value("file").is_none_or(|file| file.ends_with(NAMELESS) || value("anon").is_some());
            let by_node = if is_memory { &mut found.memory } else { &mut found.files };
            for (key, pages) in values() {
                let node = key.strip_prefix('N').and_then(|node| node.parse::<u32>().ok());
                if let (Some(node), Ok(pages)) = (node, pages.parse::<u64>()) {
                    let bytes = pages.saturating_mul(page_kib).saturating_mul(1 << 10);
                    let sum: &mut u64 = by_node.entry(node).or_default();
                    *sum = sum.saturating_add(bytes);
                }
            }
        }
        found
    }

    /// Returns the size of the memory that is not on `node`, bytes.
    pub fn remote_bytes(&self, node: u32) -> u64 {
        self.memory.iter().filter(|(at, _)| **at != node).map(|(_, bytes)| bytes).sum()
    }
}

/// Moves the pages of process `pid` from the nodes `from` to node `to`. Returns the number of pages that the kernel
/// could not move.
///
/// Pages that other processes map, such as those of a template, stay. To ensure that, the calling thread gives up
/// CAP_SYS_NICE, with which the kernel would move them.
pub fn migrate(pid: u32, from: &Cpus, to: u32) -> io::Result<u64> {
    let to = Cpus::one(to).ok_or(io::ErrorKind::InvalidInput)?;
    let pid = libc::c_long::from(i32::try_from(pid).map_err(io::Error::other)?);
    let (old, new) = (mask(from), mask(&to));
    let moving = std::thread::Builder::new().name("migrate".to_owned()).spawn(move || {
        caps::drop(None, CapSet::Effective, Capability::CAP_SYS_NICE).map_err(io::Error::other)?;
        // The kernel reads one bit less than the number that it is given.
        let bits = old.len().max(new.len()) * WORD + 1;
        // SAFETY: both masks have one bit less than that number, and the call only reads them.
        let left = unsafe { libc::syscall(libc::SYS_migrate_pages, pid, bits, old.as_ptr(), new.as_ptr()) };
        u64::try_from(left).map_err(|_| io::Error::last_os_error())
    })?;
    moving.join().unwrap_or_else(|_| Err(io::Error::other("the thread that moves pages panicked")))
}

/// Words of the kernel's mask of at most 1024 nodes.
const WORDS: usize = 1024 / WORD;

/// Returns the kernel's form of a set of nodes. Linux has at most 1024 nodes; larger numbers are left out.
fn mask(nodes: &Cpus) -> [libc::c_ulong; WORDS] {
    let mut mask = [0; WORDS];
    for node in nodes.iter() {
        let node = usize::try_from(node).unwrap_or(usize::MAX);
        if let Some(word) = mask.get_mut(node / WORD) {
            *word |= 1 << (node % WORD);
        }
    }
    mask
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_counted_by_node_in_pages_of_any_size() {
        let text = "\
55d1c0000000 default file=/usr/bin/qemu-system-x86_64 mapped=100 mapmax=3 N0=60 N1=40 kernelpagesize_kB=4
55d1c1000000 default file=/usr/bin/qemu-system-x86_64 anon=5 dirty=5 N1=7 kernelpagesize_kB=4
7f0000000000 default anon=1000 dirty=1000 N0=990 N1=10 kernelpagesize_kB=4
7f1000000000 bind:1 file=/anon_hugepage\\040(deleted) huge dirty=3 N1=3 kernelpagesize_kB=2048
7f2000000000 default file=/memfd:template\\040(deleted) mapped=50 N0=50 kernelpagesize_kB=4
7f3000000000 default heap
7f4000000000 default stack anon=x N0=many N1=-1
";
        let found = Residence::parse(text);
        let kib = |pages: &[(u32, u64)]| pages.iter().map(|(node, kib)| (*node, kib << 10)).collect();
        assert_eq!(found.memory, kib(&[(0, 4 * 1040), (1, 4 * 17 + 3 * 2048)]));
        assert_eq!(found.files, kib(&[(0, 240), (1, 160)]));
        assert_eq!(found.remote_bytes(1), 4160 << 10);
        assert_eq!(Residence::parse(""), Residence::default());
    }

    #[test]
    fn a_set_of_nodes_is_a_mask() {
        let words = |list| mask(&Cpus::parse(list).unwrap());
        assert_eq!(words("0,2")[..2], [0b101, 0]);
        assert_eq!(words("64-65")[..2], [0, 0b11]);
        assert_eq!(words("8000"), [0; WORDS]);
    }

    #[test]
    fn this_process_has_memory_on_a_node_and_moves_to_it() {
        let own = Residence::read(std::process::id()).unwrap();
        let (&node, &bytes) = own.memory.iter().max_by_key(|(_, bytes)| **bytes).unwrap();
        assert!(bytes > 64 << 10, "{own:?}");
        let all = Cpus::parse("0-63").unwrap();
        assert_eq!(migrate(std::process::id(), &all, node).unwrap(), 0);
        let error = migrate(i32::MAX.unsigned_abs(), &all, node).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
        assert!(Residence::read(i32::MAX.unsigned_abs()).is_err());
    }
}
