//! A pod's network: connects its interfaces to its VM.
//!
//! ```text
//!   pod's namespace                                            guest
//!   eth0 ◀──redirect──▶ sbx-2, a tap ◀── file ──▶ VMM ◀──▶ NIC 0, called eth0
//!
//!   a VM of the pool already has its tap, in a namespace without a pod:
//!   eth0 ◀──redirect──▶ sbx-2 ◀──veth──▶ c7 ◀──redirect──▶ t7, a tap ◀── file ──▶ VMM
//! ```
//!
//! A VMM that opens its taps itself runs in their namespace, which is its own and contains no other device.
//!
//! Every packet that arrives at an interface is redirected to the tap before the namespace's own network stack sees it.
//! So the guest uses the pod's addresses, although the interface keeps them: CNI plugins check them there, and
//! containerd reads counters there.
//!
//! No clean-up is needed: a tap is removed with its VMM, the rest with the pod's namespace, which belongs to
//! containerd. A failed VM's devices are replaced by the next one.

mod egress;
mod error;
mod filters;
pub mod interface;
mod link;
pub mod namespace;
pub mod ports;
mod shape;
pub mod steer;
pub mod tap;
pub mod tap_pool;
pub mod traffic;

use std::{
    ffi::CString,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
};

use sandboxer_config::ForeignRules;
use sandboxer_netlink::{
    Netlink,
    packet::{
        RouteNetlinkMessage, address::AddressMessage, link::LinkMessage, neighbour::NeighbourMessage,
        route::RouteMessage,
    },
};
use sandboxer_protocol::id::SandboxId;

use self::error::{At, Failed};
pub use self::{
    egress::Egress,
    error::{NetworkError, Step},
    interface::Interface,
    link::MODPROBE,
    shape::NetLimits,
    tap_pool::{PooledTap, TapPool},
};

/// Returns the interfaces of the pod whose namespace is at `netns`. Packet filters there would not apply to the guest,
/// so they are an error unless `rules` ignores them.
pub async fn look(
    pod: &SandboxId,
    netns: &Path,
    rules: ForeignRules,
) -> Result<Vec<Interface>, NetworkError> {
    let (dumped, filters) = within(pod, netns, move || {
        let filters = match rules {
            ForeignRules::Refuse => filters::found().at_step("look for packet filters")?,
            ForeignRules::Ignore => None,
        };
        let mut netlink = Netlink::open().at_step(RTNETLINK)?;
        let kinds = [
            (RouteNetlinkMessage::GetLink(LinkMessage::default()), "list interfaces"),
            (RouteNetlinkMessage::GetAddress(AddressMessage::default()), "list addresses"),
            (RouteNetlinkMessage::GetRoute(RouteMessage::default()), "list routes"),
            (RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()), "list neighbours"),
        ];
        let mut all = Vec::new();
        for (kind, step) in kinds {
            all.append(&mut netlink.dump(kind).at_step(step)?);
        }
        Ok((all, filters))
    })
    .await?;
    let ids = || (pod.clone(), netns.to_owned());
    if let Some(rules) = filters {
        let (pod, netns) = ids();
        return Err(NetworkError::ForeignRules { pod, netns, rules });
    }
    interface::interfaces(dumped).map_err(|source| {
        let (pod, netns) = ids();
        NetworkError::Unsuitable { pod, netns, source }
    })
}

/// A step that several operations share.
const RTNETLINK: &str = "open an rtnetlink socket";

/// Tests the kernel's features: creates two taps and joins them like a pod's, in a network namespace that is removed
/// afterwards.
pub fn trial() -> io::Result<()> {
    namespace::within(namespace::fresh()?, || -> io::Result<()> {
        let taps = [tap::open(c"one")?, tap::open(c"two")?];
        let mut netlink = Netlink::open()?;
        let one = link::bring_up(&mut netlink, "one", TRIAL_MTU)?;
        let two = link::bring_up(&mut netlink, "two", TRIAL_MTU)?;
        link::join(&mut netlink, one, two)?;
        drop(taps);
        Ok(())
    })
}

const TRIAL_MTU: u32 = 1500;

/// Creates a tap for each of the pod's interfaces, joined to it, for a VMM that is about to start.
pub async fn taps(
    pod: &SandboxId,
    netns: &Path,
    interfaces: &[Interface],
    limits: NetLimits,
) -> Result<Vec<Arc<OwnedFd>>, NetworkError> {
    let wanted = devices(interfaces, &limits);
    within(pod, netns, move || {
        let mut netlink = Netlink::open().at_step(RTNETLINK)?;
        wanted.into_iter().map(|device| device.tap(&mut netlink).map(Arc::new)).collect()
    })
    .await
}

/// Joins the pod's interfaces to a VM's existing taps, one each.
pub async fn plug(
    pod: &SandboxId,
    netns: &Path,
    interfaces: &[Interface],
    limits: NetLimits,
    (tap_pool, taps): (Arc<TapPool>, Vec<PooledTap>),
) -> Result<(), NetworkError> {
    let wanted = devices(interfaces, &limits);
    within(pod, netns, move || {
        let mut netlink = Netlink::open().at_step(RTNETLINK)?;
        for (device, tap) in wanted.iter().zip(&taps) {
            device.remove_old(&mut netlink)?;
            tap_pool.veth(&mut netlink, tap, &device.name, device.mtu).at("create veth", &device.name)?;
            device.join(&mut netlink)?;
        }
        let joined: Vec<_> = wanted.iter().map(|device| device.mtu).zip(&taps).collect();
        tap_pool.join(&joined)
    })
    .await
}

/// A device of this daemon that is joined to one of the pod's interfaces.
struct Device {
    interface: u32,
    name: String,
    mtu: u32,
    limits: NetLimits,
}

impl Device {
    fn tap(self, netlink: &mut Netlink) -> Result<OwnedFd, Failed> {
        self.remove_old(netlink)?;
        let name = CString::new(self.name.as_str()).map_err(io::Error::from)?;
        let tap = tap::open(&name).at("create tap", &self.name)?;
        self.join(netlink)?;
        Ok(tap)
    }

    /// Removes a device left by a VM that failed.
    fn remove_old(&self, netlink: &mut Netlink) -> Result<(), Failed> {
        link::remove(netlink, &self.name).at("remove", &self.name)
    }

    fn join(&self, netlink: &mut Netlink) -> Result<(), Failed> {
        let index = link::bring_up(netlink, &self.name, self.mtu).at("bring up", &self.name)?;
        // The limits are set before the first packet.
        for (device, rate) in [(index, self.limits.received), (self.interface, self.limits.sent)] {
            if let Some(rate) = rate {
                shape::limit(netlink, device, rate).at("limit packets of the interface with", &self.name)?;
            }
        }
        let joined = match &self.limits.egress {
            None => link::join(netlink, self.interface, index),
            Some(egress) => {
                let programs = egress.programs().at("load the programs for packets of", &self.name)?;
                link::join_filtered(netlink, self.interface, index, &programs)
            }
        };
        joined.at("redirect packets of the pod's interface to", &self.name)
    }
}

fn devices(interfaces: &[Interface], limits: &NetLimits) -> Vec<Device> {
    let device = |interface: &Interface| Device {
        interface: interface.index,
        name: interface.host_device(),
        mtu: interface.mtu,
        limits: limits.clone(),
    };
    interfaces.iter().map(device).collect()
}

async fn within<T: Send + 'static>(
    pod: &SandboxId,
    netns: &Path,
    work: impl FnOnce() -> Result<T, Failed> + Send + 'static,
) -> Result<T, NetworkError> {
    let path: PathBuf = netns.to_owned();
    let done = tokio::task::spawn_blocking(move || {
        let namespace = namespace::open(&path).at_step("open it")?;
        namespace::within(namespace, work)
    });
    done.await.unwrap_or_else(|panic| Err(io::Error::other(panic).into())).map_err(|failed| {
        NetworkError::Step {
            pod: pod.clone(),
            netns: netns.to_owned(),
            step: failed.step,
            source: failed.source,
        }
    })
}
