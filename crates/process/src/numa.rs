//! NUMA nodes of the host, as the kernel describes them.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use sandboxer_base::Cpus;

use crate::huge_pages::HUGE_PAGE;

/// Fields of a node's `meminfo` whose memory is available to a process at once: free pages, and caches that the kernel
/// drops.
const AVAILABLE: [&str; 4] = ["MemFree", "Active(file)", "Inactive(file)", "SReclaimable"];

/// A node with CPUs and memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Number of the node.
    pub id: u32,
    /// CPUs of the node.
    pub cpus: Cpus,
    /// Memory of the node, bytes.
    pub memory_bytes: u64,
}

/// The NUMA nodes of a host. Nodes without CPUs or without memory are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    dir: PathBuf,
    nodes: Vec<Node>,
}

impl Topology {
    /// Reads the nodes at `dir`, which is `/sys/devices/system/node` on a host. A kernel without NUMA has none.
    pub fn read(dir: &Path) -> Self {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let id = |name: &str| name.strip_prefix("node")?.parse().ok();
        let ids = entries.filter_map(|entry| id(entry.file_name().to_str()?));
        let node = |id: u32| {
            let list = fs::read_to_string(dir.join(format!("node{id}/cpulist"))).ok()?;
            let memory_bytes = field(&meminfo(dir, id).ok()?, "MemTotal").filter(|bytes| *bytes > 0)?;
            Some(Node { id, cpus: Cpus::parse(&list)?, memory_bytes })
        };
        let mut nodes: Vec<Node> = ids.filter_map(node).collect();
        nodes.sort_by_key(|node| node.id);
        Self { dir: dir.to_owned(), nodes }
    }

    /// Returns the nodes in the order of their numbers.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the node that has all of these CPUs.
    pub fn node_of(&self, cpus: &Cpus) -> Option<&Node> {
        self.nodes.iter().find(|node| cpus.is_within(&node.cpus))
    }

    /// Returns the size of a node's free huge pages of 2 MiB, bytes, including pages that are reserved and not yet
    /// used.
    pub fn huge_pages_bytes(&self, node: u32) -> io::Result<u64> {
        let path = self.dir.join(format!("node{node}/hugepages/hugepages-2048kB/free_hugepages"));
        let free: u64 = fs::read_to_string(path)?.trim().parse().map_err(io::Error::other)?;
        Ok(free.saturating_mul(HUGE_PAGE))
    }

    /// Returns the memory of a node that is available to processes now, bytes.
    pub fn available_bytes(&self, node: u32) -> io::Result<u64> {
        let text = meminfo(&self.dir, node)?;
        field(&text, "MemFree").ok_or(io::ErrorKind::InvalidData)?;
        Ok(AVAILABLE.iter().filter_map(|name| field(&text, name)).sum())
    }
}

fn meminfo(dir: &Path, node: u32) -> io::Result<String> {
    fs::read_to_string(dir.join(format!("node{node}/meminfo")))
}

/// Returns the value of a field in lines such as `Node 0 MemFree: 1234 kB`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| {
        let (_, rest) = line.split_once(name)?;
        rest.strip_prefix(':')
    })?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(nodes: &[(&str, &str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (node, cpus, meminfo) in nodes {
            fs::create_dir(dir.path().join(node)).unwrap();
            fs::write(dir.path().join(node).join("cpulist"), cpus).unwrap();
            fs::write(dir.path().join(node).join("meminfo"), meminfo).unwrap();
        }
        dir
    }

    const MEMINFO: &str = "Node 1 MemTotal:       2048 kB
Node 1 MemFree:         100 kB
Node 1 Active:           50 kB
Node 1 Active(file):     20 kB
Node 1 Inactive(file):    3 kB
Node 1 SReclaimable:      4 kB
";

    #[test]
    fn nodes_with_cpus_and_memory_are_found() {
        let dir = host(&[
            ("node1", "4-7\n", MEMINFO),
            ("node0", "0-3\n", "Node 0 MemTotal: 1024 kB\nNode 0 MemFree: 0 kB\n"),
            ("node2", "\n", "Node 2 MemTotal: 1024 kB\n"),
            ("node3", "8\n", "Node 3 MemTotal: 0 kB\n"),
            ("nodes", "9\n", MEMINFO),
        ]);
        fs::write(dir.path().join("online"), "0-3\n").unwrap();
        let topology = Topology::read(dir.path());
        let seen: Vec<_> =
            topology.nodes().iter().map(|node| (node.id, node.cpus.to_string(), node.memory_bytes)).collect();
        assert_eq!(seen, [(0, "0-3".to_owned(), 1 << 20), (1, "4-7".to_owned(), 2 << 20)]);
        let node_of = |cpus| topology.node_of(&Cpus::parse(cpus).unwrap()).map(|node| node.id);
        assert_eq!(
            (node_of("5-6"), node_of("3"), node_of("3-4"), node_of("9")),
            (Some(1), Some(0), None, None)
        );
    }

    #[test]
    fn what_the_kernel_can_drop_is_available() {
        let dir = host(&[("node1", "4-7\n", MEMINFO), ("node5", "8\n", "Node 5 MemTotal: 1 kB\n")]);
        let topology = Topology::read(dir.path());
        assert_eq!(topology.available_bytes(1).unwrap(), 127 << 10);
        assert_eq!(topology.available_bytes(5).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(topology.available_bytes(0).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(Topology::read(Path::new("/nonexistent")).nodes(), []);
    }
}
