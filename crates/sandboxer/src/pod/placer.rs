//! Chooses the NUMA node for a pod's VM, and accounts for the load of each node. See decision 0023.
//!
//! A VM with a [`Seat`] runs on the CPUs of one node, so the kernel takes its memory from there while the node has
//! some. The placer restricts cgroups; it does not bind memory: a VM whose node is full gets memory of another one.

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandboxer_base::Cpus;
use sandboxer_config::{PlacementConfig, PlacementPolicy};
use sandboxer_process::{
    cgroup::{Bounds, Cgroup, Hierarchies},
    numa::{Node, Topology},
};
use sandboxer_vmm::Shape;
use serde::{Deserialize, Serialize};

/// Chooses nodes, and counts the VMs on each.
#[derive(Debug)]
pub struct Placer {
    policy: PlacementPolicy,
    topology: Topology,
    /// Nodes that VMs may use, with the CPUs that VMs may use; empty if pods are not placed.
    nodes: Vec<Node>,
    /// CPUs of the host that VMs may use; `None`: all.
    unreserved: Option<Cpus>,
    // A plain lock: held for a few additions, never across an await.
    load: Mutex<BTreeMap<u32, Load>>,
    /// The cgroups of VMs without a pod, by node.
    idle: BTreeMap<u32, Cgroup>,
}

/// The load of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Number of VMs, including the pool's.
    pub vms: u32,
    /// Number of the VMs' vCPUs.
    pub vcpus: u32,
    /// Memory of the VMs, MiB.
    pub memory_mib: u64,
}

/// The place of one VM on a node. Dropping the last clone frees it.
#[derive(Debug, Clone)]
pub struct Seat(Arc<Taken>);

#[derive(Debug)]
struct Taken {
    placer: Arc<Placer>,
    node: Node,
    // Locked only while the placer's load is: both change together.
    shape: Mutex<Shape>,
}

/// The placement of a pod in its record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementRecord {
    /// The pod's NUMA node; `None`: not placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// The reason for the placement, or why there is none.
    #[serde(default)]
    pub reason: String,
}

/// The placement of a pod.
#[derive(Debug, Clone, Default)]
pub struct Placement {
    /// The pod's place; `None`: not placed.
    pub seat: Option<Seat>,
    /// The reason for the placement, or why there is none; empty if there is nothing to choose.
    pub reason: String,
}

/// A reason why a VM gets no node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unplaced {
    /// Pods are not placed on this host: the policy is off, or there is one node.
    Nothing,
    /// The VM is larger than every node.
    TooLarge,
    /// No node has enough memory available.
    NoMemory,
}

impl fmt::Display for Unplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "",
            Self::TooLarge => "it is larger than a node",
            Self::NoMemory => "no node has enough memory available",
        })
    }
}

/// A reason why a pod cannot have a certain node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoSeat {
    /// Pods are not placed.
    #[error(
        "pods are not placed on this host: placement.policy is off, or there is only one node with CPUs for VMs"
    )]
    Nothing,
    /// The node does not exist.
    #[error("the host has no node {node} with CPUs for VMs: it has {nodes}")]
    NoNode {
        /// The requested node.
        node: u32,
        /// The existing nodes.
        nodes: String,
    },
    /// The pod is larger than the node.
    #[error("its {shape} do not fit node {node}, which has {cpus} CPUs for VMs and {memory_mib} MiB")]
    TooLarge {
        /// The pod's size.
        shape: Shape,
        /// The requested node.
        node: u32,
        /// The number of the node's CPUs.
        cpus: usize,
        /// The node's memory, MiB.
        memory_mib: u64,
    },
    /// The node does not have enough memory now.
    #[error("node {node} has {available_mib} MiB available, the pod may use {memory_mib}")]
    NoMemory {
        /// The requested node.
        node: u32,
        /// The node's available memory, MiB.
        available_mib: u64,
        /// The pod's memory, MiB.
        memory_mib: u64,
    },
}

impl Placer {
    /// Creates the placer of a host, with cgroups for VMs without a pod below `idle`, where pods are placed.
    pub fn new(config: &PlacementConfig, cgroups: &Hierarchies, idle: &str) -> Self {
        let topology = Topology::read(&config.nodes_dir);
        let reserved = config.reserved_cpus.as_ref();
        let usable = |node: &Node| Some(Node { cpus: node.cpus.without(reserved)?, ..node.clone() });
        let nodes: Vec<Node> = topology.nodes().iter().filter_map(usable).collect();
        let unreserved = reserved.and_then(|_| online(&config.nodes_dir, &topology)?.without(reserved));
        if reserved.is_some() && unreserved.is_none() {
            tracing::error!("placement.reserved_cpus names all CPUs: no CPU is reserved");
        }
        let placed = config.policy == PlacementPolicy::Numa && nodes.len() > 1;
        let nodes = if placed { nodes } else { Vec::new() };
        let group = |node: &Node| Some((node.id, cgroups.named(&format!("{idle}/node{}", node.id))?));
        let idle = if idle.is_empty() { BTreeMap::new() } else { nodes.iter().filter_map(group).collect() };
        Self { policy: config.policy, topology, nodes, unreserved, load: Mutex::default(), idle }
    }

    /// Creates the cgroups of VMs without a pod. On failure, these VMs are not placed.
    pub fn prepare(mut self, common: Option<&Cgroup>) -> Self {
        let everywhere = Bounds { cpus: self.unreserved.clone(), nodes: None };
        let cpus_of =
            |node: u32| self.nodes.iter().find(|known| known.id == node).map(|node| node.cpus.clone());
        let bounded =
            self.idle.iter().map(|(node, group)| (group, Bounds { cpus: cpus_of(*node), nodes: None }));
        let common = common.filter(|_| everywhere != Bounds::default()).map(|group| (group, everywhere));
        let made = common.into_iter().chain(bounded).try_for_each(|(group, bounds)| {
            group.make()?;
            group.restrict(&bounds)
        });
        if let Err((path, error)) = made {
            tracing::warn!(path = %path.display(), %error, "cannot restrict VMs without a pod to CPUs: they run on all");
            self.idle.clear();
        }
        self
    }

    /// Returns the policy.
    pub fn policy(&self) -> PlacementPolicy {
        self.policy
    }

    /// Returns the nodes of the host with their CPUs and memory.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns whether pods are placed.
    pub fn is_active(&self) -> bool {
        !self.nodes.is_empty()
    }

    /// Returns the load of `node`.
    pub fn load(&self, node: u32) -> Load {
        self.lock().get(&node).copied().unwrap_or_default()
    }

    /// Returns the cgroup for a VM without a pod on the node of `seat`.
    pub fn idle(&self, seat: &Seat) -> Option<&Cgroup> {
        self.idle.get(&seat.node())
    }

    /// Returns whether VMs without a pod are placed.
    pub fn places_idle(&self) -> bool {
        !self.idle.is_empty()
    }

    /// Takes a place for a VM on the node with the fewest vCPUs per CPU, among those with enough memory available;
    /// among equals, the node with the most memory.
    pub fn seat(self: &Arc<Self>, shape: Shape) -> Result<Seat, Unplaced> {
        self.seat_by(shape, |node| self.topology.available_bytes(node))
    }

    /// Same as [`Placer::seat`], for a VM whose memory is in huge pages.
    pub fn seat_in_huge_pages(self: &Arc<Self>, shape: Shape) -> Result<Seat, Unplaced> {
        self.seat_by(shape, |node| self.topology.huge_pages_bytes(node))
    }

    fn seat_by(
        self: &Arc<Self>,
        shape: Shape,
        available: impl Fn(u32) -> io::Result<u64>,
    ) -> Result<Seat, Unplaced> {
        if self.nodes.is_empty() {
            return Err(Unplaced::Nothing);
        }
        let mut candidates = Vec::new();
        for node in self.nodes.iter().filter(|node| fits(shape, node)) {
            let available = available(node.id).unwrap_or_default();
            candidates.push((node, available));
        }
        if candidates.is_empty() {
            return Err(Unplaced::TooLarge);
        }
        candidates.retain(|(_, available)| *available >= shape.memory_mib << 20);
        let mut load = self.lock();
        // vCPUs per CPU, including the new VM's, in units that are whole numbers.
        let crowd = |node: &Node| {
            let vcpus = load.get(&node.id).map_or(0, |load| load.vcpus) + shape.vcpus;
            u64::from(vcpus) * 1_000_000 / node.cpus.count() as u64
        };
        let best = candidates.into_iter().min_by_key(|(node, available)| (crowd(node), u64::MAX - available));
        let (node, _) = best.ok_or(Unplaced::NoMemory)?;
        Ok(self.take(&mut load, node, shape))
    }

    /// Takes a place on `node` for a VM that moves there.
    pub fn seat_on(self: &Arc<Self>, node: u32, shape: Shape) -> Result<Seat, NoSeat> {
        let found = self.find(node)?;
        let memory_mib = found.memory_bytes >> 20;
        if !fits(shape, found) {
            return Err(NoSeat::TooLarge { shape, node, cpus: found.cpus.count(), memory_mib });
        }
        let available = self.topology.available_bytes(node).unwrap_or_default();
        if available < shape.memory_mib << 20 {
            let available_mib = available >> 20;
            return Err(NoSeat::NoMemory { node, available_mib, memory_mib: shape.memory_mib });
        }
        Ok(self.take(&mut self.lock(), found, shape))
    }

    /// Takes the place that a VM already has on `node`, by its record or by CRI.
    pub fn seat_again(self: &Arc<Self>, node: u32, shape: Shape) -> Result<Seat, NoSeat> {
        Ok(self.take(&mut self.lock(), self.find(node)?, shape))
    }

    /// Returns the placement of a pod of an earlier daemon.
    pub fn again(self: &Arc<Self>, record: Option<PlacementRecord>, shape: Shape) -> Placement {
        let Some(PlacementRecord { node, reason }) = record.filter(|_| self.is_active()) else {
            return Placement::default();
        };
        let Some(node) = node else { return Placement { seat: None, reason } };
        match self.seat_again(node, shape) {
            Ok(seat) => Placement { seat: Some(seat), reason },
            Err(error) => Placement { seat: None, reason: error.to_string() },
        }
    }

    /// Returns the CPUs and memory nodes that the VMM of a pod with this seat may use, unless CRI sets others.
    pub fn bounds(&self, seat: Option<&Seat>) -> Bounds {
        let cpus = seat.map(|seat| seat.cpus().clone()).or_else(|| self.unreserved.clone());
        Bounds { cpus, nodes: None }
    }

    /// Returns the node that has all of `cpus`, among the nodes for VMs.
    pub fn node_of(&self, cpus: &Cpus) -> Option<u32> {
        self.topology.node_of(cpus).map(|node| node.id).filter(|id| self.find(*id).is_ok())
    }

    fn find(&self, node: u32) -> Result<&Node, NoSeat> {
        if self.nodes.is_empty() {
            return Err(NoSeat::Nothing);
        }
        let known = || self.nodes.iter().map(|node| node.id.to_string()).collect::<Vec<_>>().join(", ");
        let found = self.nodes.iter().find(|known| known.id == node);
        found.ok_or_else(|| NoSeat::NoNode { node, nodes: known() })
    }

    fn take(self: &Arc<Self>, load: &mut BTreeMap<u32, Load>, node: &Node, shape: Shape) -> Seat {
        let sum = load.entry(node.id).or_default();
        sum.vms += 1;
        sum.vcpus += shape.vcpus;
        sum.memory_mib += shape.memory_mib;
        Seat(Arc::new(Taken { placer: self.clone(), node: node.clone(), shape: Mutex::new(shape) }))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Load>> {
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns all online CPUs of the host.
fn online(nodes_dir: &Path, topology: &Topology) -> Option<Cpus> {
    let all = fs::read_to_string(nodes_dir.with_file_name("cpu").join("online")).ok();
    let of_nodes = || Cpus::union(topology.nodes().iter().map(|node| Some(node.cpus.clone())));
    all.and_then(|list| Cpus::parse(&list)).or_else(of_nodes)
}

/// Returns whether an empty node could hold a VM of this shape.
fn fits(shape: Shape, node: &Node) -> bool {
    shape.vcpus as usize <= node.cpus.count() && shape.memory_mib << 20 <= node.memory_bytes
}

impl Seat {
    /// Returns the node of this place.
    pub fn node(&self) -> u32 {
        self.0.node.id
    }

    /// Accounts for the VM with a new size.
    pub fn resize(&self, vcpus: u32, memory_mib: u64) {
        let Taken { placer, node, shape } = &*self.0;
        let mut load = placer.lock();
        let mut shape = shape.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sum) = load.get_mut(&node.id) {
            sum.vcpus = sum.vcpus - shape.vcpus + vcpus;
            sum.memory_mib = sum.memory_mib - shape.memory_mib + memory_mib;
        }
        *shape = Shape { vcpus, memory_mib, ..*shape };
    }

    /// Returns the CPUs of the node that VMs may use.
    pub fn cpus(&self) -> &Cpus {
        &self.0.node.cpus
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut load = self.placer.lock();
        let shape = *self.shape.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sum) = load.get_mut(&self.node.id) {
            sum.vms -= 1;
            sum.vcpus -= shape.vcpus;
            sum.memory_mib -= shape.memory_mib;
        }
    }
}

impl Placement {
    /// Returns the placement of a pod that is not on a node.
    pub fn none(reason: impl Into<String>) -> Self {
        Self { seat: None, reason: reason.into() }
    }

    /// Returns the pod's node.
    pub fn node(&self) -> Option<u32> {
        self.seat.as_ref().map(Seat::node)
    }

    /// Returns the placement for the pod's record; `None` if there was nothing to choose.
    pub fn record(&self) -> Option<PlacementRecord> {
        let record = PlacementRecord { node: self.node(), reason: self.reason.clone() };
        (record != PlacementRecord::default()).then_some(record)
    }
}

#[cfg(test)]
mod tests;
