//! A pod's network: its interfaces become those of its machine.
//!
//! ```text
//!   pod's namespace                                            guest
//!   eth0 ◀──redirect──▶ sbx-2, a tap ◀── file ──▶ VMM ◀──▶ NIC 0, called eth0
//!
//!   a machine that waited has its tap already, in a namespace of nobody's:
//!   eth0 ◀──redirect──▶ sbx-2 ◀──cable──▶ c7 ◀──redirect──▶ t7, a tap ◀── file ──▶ VMM
//! ```
//!
//! All that comes in at an interface goes to the tap before the namespace's own stack sees it, so the guest
//! answers for the pod's addresses, though the interface keeps them: CNI plugins look for them there, and
//! containerd counts there.
//!
//! Nothing of this is undone: a tap goes with its VMM, the rest with the pod's namespace, which is containerd's.
//! What a machine left that did not become the pod's, the next one replaces.

mod filters;
pub mod interface;
mod link;
pub mod namespace;
pub mod park;
pub mod ports;
pub mod steer;
pub mod tap;
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

pub use self::{
    interface::Interface,
    park::{Park, Parked},
};
pub use link::MODPROBE;

use crate::error::PodError;

/// The interfaces of the pod, whose namespace is bound to `netns`. Rules of netfilter's there would not hold for the guest:
/// they are refused, unless they are to be ignored.
pub async fn look(pod: &SandboxId, netns: &Path, rules: ForeignRules) -> Result<Vec<Interface>, PodError> {
    let (dumped, filters) = within(pod, netns, "read the network namespace", move || {
        let filters = match rules {
            ForeignRules::Refuse => filters::found()?,
            ForeignRules::Ignore => None,
        };
        let mut netlink = Netlink::open()?;
        let kinds = [
            RouteNetlinkMessage::GetLink(LinkMessage::default()),
            RouteNetlinkMessage::GetAddress(AddressMessage::default()),
            RouteNetlinkMessage::GetRoute(RouteMessage::default()),
            RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()),
        ];
        let mut all = Vec::new();
        for kind in kinds {
            all.append(&mut netlink.dump(kind)?);
        }
        Ok((all, filters))
    })
    .await?;
    if let Some(filters) = filters {
        return Err(PodError::Unsupported(format!(
            "pod {pod}: its network namespace {netns:?} has {filters}, by which the guest's packets would pass: put them \
             into the guest (a mesh's init container does), or set network.foreign_rules to \"ignore\""
        )));
    }
    interface::interfaces(dumped)
        .map_err(|error| PodError::Unsupported(format!("pod {pod}: its network namespace {error}")))
}

/// Makes two taps and joins them as a pod's are joined, in a network namespace that goes with them.
pub fn trial() -> io::Result<()> {
    namespace::within(namespace::fresh()?, || {
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

/// Makes a tap for each of the pod's interfaces, joined to it, for a VMM that is about to start.
pub async fn taps(
    pod: &SandboxId,
    netns: &Path,
    interfaces: &[Interface],
) -> Result<Vec<Arc<OwnedFd>>, PodError> {
    let wanted = devices(interfaces);
    within(pod, netns, "make taps in the network namespace", move || {
        let mut netlink = Netlink::open()?;
        wanted.into_iter().map(|device| device.tap(&mut netlink).map(Arc::new)).collect()
    })
    .await
}

/// Joins the pod's interfaces to taps that a machine has already, one each.
pub async fn plug(
    pod: &SandboxId,
    netns: &Path,
    interfaces: &[Interface],
    park: Arc<Park>,
    taps: Vec<Parked>,
) -> Result<(), PodError> {
    let wanted = devices(interfaces);
    within(pod, netns, "plug taps into the network namespace", move || {
        let mut netlink = Netlink::open()?;
        for (device, tap) in wanted.iter().zip(&taps) {
            link::remove(&mut netlink, &device.name)?;
            park.cable(&mut netlink, tap, &device.name, device.mtu)?;
            let ours = link::bring_up(&mut netlink, &device.name, device.mtu)?;
            link::join(&mut netlink, device.interface, ours)?;
        }
        park.connect(wanted.iter().map(|device| device.mtu).zip(&taps))
    })
    .await
}

/// A device of ours beside an interface of the pod's.
struct Device {
    interface: u32,
    name: String,
    mtu: u32,
}

impl Device {
    fn tap(self, netlink: &mut Netlink) -> io::Result<OwnedFd> {
        link::remove(netlink, &self.name)?;
        let tap = tap::open(&CString::new(self.name.as_str())?)?;
        let index = link::bring_up(netlink, &self.name, self.mtu)?;
        link::join(netlink, self.interface, index)?;
        Ok(tap)
    }
}

fn devices(interfaces: &[Interface]) -> Vec<Device> {
    let device = |interface: &Interface| Device {
        interface: interface.index,
        name: interface.host_device(),
        mtu: interface.mtu,
    };
    interfaces.iter().map(device).collect()
}

async fn within<T: Send + 'static>(
    pod: &SandboxId,
    netns: &Path,
    action: &'static str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, PodError> {
    let path: PathBuf = netns.to_owned();
    let done = tokio::task::spawn_blocking(move || namespace::within(namespace::open(&path)?, work));
    done.await.unwrap_or_else(|panic| Err(io::Error::other(panic))).map_err(|source| PodError::Host {
        pod: pod.clone(),
        action,
        path: netns.to_owned(),
        source,
    })
}
