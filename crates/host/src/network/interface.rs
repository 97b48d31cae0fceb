//! A pod's network interfaces, read from its network namespace.
//!
//! The result of CNI is only what plugins reported. The namespace has the actual configuration.

use std::{collections::BTreeMap, fmt, net::IpAddr};

use sandboxer_netlink::packet::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{LinkAttribute, LinkFlags, LinkLayerType, LinkMessage},
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState},
    route::{RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteType},
};
use sandboxer_protocol::agent as wire;
use serde::{Deserialize, Serialize};

/// The most interfaces of a VM.
const MAX_INTERFACES: usize = 8;
/// The most addresses, routes and neighbours of an interface, each.
const MAX_OF_EACH: usize = 256;
/// The prefix of the names of this daemon's devices in a pod's namespace.
const OURS: &str = "sbx-";
/// Length of an Ethernet address, bytes.
const MAC_LEN: usize = 6;

/// A network interface of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// The interface's index in the namespace.
    pub index: u32,
    /// The interface's name, there and in the guest.
    pub name: String,
    /// The interface's Ethernet address.
    pub mac: Mac,
    /// Largest packet, bytes.
    pub mtu: u32,
    /// The interface's addresses.
    pub addresses: Vec<Address>,
    /// The interface's routes.
    pub routes: Vec<Route>,
    /// The interface's permanent neighbour entries.
    pub neighbours: Vec<Neighbour>,
}

impl Interface {
    /// Returns the name of the device that connects the interface to the VM.
    pub fn host_device(&self) -> String {
        // The name contains the index, since the interface's name may already have the maximum length.
        format!("{OURS}{}", self.index)
    }
}

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mac(pub [u8; MAC_LEN]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// Length of the network prefix, bits.
    pub prefix_length: u8,
    /// The scope, as in rtnetlink: 0 is global, 253 the link.
    pub scope: u8,
    /// The other end of a point-to-point link.
    pub peer: Option<IpAddr>,
    /// The broadcast address of the network.
    pub broadcast: Option<IpAddr>,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix_length)
    }
}

/// A route.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The destination network; all zeroes with length 0 for the default route.
    pub destination: IpAddr,
    /// Length of the destination's prefix, bits.
    pub prefix_length: u8,
    /// The gateway's address; `None`: the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Preferred source address.
    pub source: Option<IpAddr>,
    /// The route's metric; the lowest wins.
    pub metric: u32,
    /// The scope, as in an [`Address`].
    pub scope: u8,
    /// Whether the gateway is on the link, even without a route to it.
    pub on_link: bool,
    /// The largest packet of this route, bytes; 0: the interface's limit applies.
    pub mtu: u32,
}

/// A neighbour entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// The neighbour's IP address.
    pub ip: IpAddr,
    /// The neighbour's Ethernet address.
    pub mac: Mac,
}

/// A configuration that a VM cannot have; completes "the pod's network …".
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsuitable {
    /// An interface that is not Ethernet.
    #[error("has interface {0:?}, which is not Ethernet")]
    NotEthernet(String),
    /// More interfaces than a VM supports.
    #[error("has more than {MAX_INTERFACES} interfaces")]
    TooManyInterfaces,
    /// More objects of a kind than the limit.
    #[error("has more than {MAX_OF_EACH} {what} on interface {interface:?}")]
    TooMany {
        /// The kind of the objects: "addresses", "routes", "neighbours".
        what: &'static str,
        /// The interface.
        interface: String,
    },
    /// A route that the guest cannot have.
    #[error("has a route to {to} by {how}, which is not supported in the guest")]
    Route {
        /// The route's destination.
        to: String,
        /// The unsupported feature of the route.
        how: &'static str,
    },
}

/// Parses rtnetlink dumps; returns all interfaces except loopback.
pub fn interfaces(dumped: Vec<RouteNetlinkMessage>) -> Result<Vec<Interface>, Unsuitable> {
    let mut found = BTreeMap::new();
    let mut rest = Vec::new();
    for message in dumped {
        match message {
            RouteNetlinkMessage::NewLink(link) => {
                if let Some(interface) = interface(link)? {
                    found.insert(interface.index, interface);
                }
            }
            other => rest.push(other),
        }
    }
    if found.len() > MAX_INTERFACES {
        return Err(Unsuitable::TooManyInterfaces);
    }
    for message in rest {
        match message {
            RouteNetlinkMessage::NewAddress(message) => {
                if let (Some(interface), Some(address)) =
                    (found.get_mut(&message.header.index), address(&message))
                {
                    add(&mut interface.addresses, address, "addresses", &interface.name)?;
                }
            }
            RouteNetlinkMessage::NewRoute(message) => {
                if let Some((index, route)) = route(&message)?
                    && let Some(interface) = found.get_mut(&index)
                {
                    add(&mut interface.routes, route, "routes", &interface.name)?;
                }
            }
            RouteNetlinkMessage::NewNeighbour(message) => {
                if let (Some(interface), Some(neighbour)) =
                    (found.get_mut(&message.header.ifindex), neighbour(&message))
                {
                    add(&mut interface.neighbours, neighbour, "neighbours", &interface.name)?;
                }
            }
            _ => {}
        }
    }
    Ok(found.into_values().collect())
}

fn add<T>(all: &mut Vec<T>, one: T, what: &'static str, interface: &str) -> Result<(), Unsuitable> {
    if all.len() == MAX_OF_EACH {
        return Err(Unsuitable::TooMany { what, interface: interface.to_owned() });
    }
    all.push(one);
    Ok(())
}

/// Parses a link; `None` if it is not an interface of the pod.
fn interface(link: LinkMessage) -> Result<Option<Interface>, Unsuitable> {
    let (mut name, mut mac, mut mtu) = (String::new(), None, 0);
    for attribute in link.attributes {
        match attribute {
            LinkAttribute::IfName(it) => name = it,
            LinkAttribute::Address(bytes) => mac = bytes.try_into().ok().map(Mac),
            LinkAttribute::Mtu(it) => mtu = it,
            _ => {}
        }
    }
    // Unused devices are down: the kernel creates some in each namespace.
    if link.header.flags.contains(LinkFlags::Loopback)
        || !link.header.flags.contains(LinkFlags::Up)
        || name.starts_with(OURS)
    {
        return Ok(None);
    }
    match mac {
        Some(mac) if link.header.link_layer_type == LinkLayerType::Ether => Ok(Some(Interface {
            index: link.header.index,
            name,
            mac,
            mtu,
            addresses: Vec::new(),
            routes: Vec::new(),
            neighbours: Vec::new(),
        })),
        _ => Err(Unsuitable::NotEthernet(name)),
    }
}

fn address(message: &AddressMessage) -> Option<Address> {
    let (mut local, mut address, mut broadcast) = (None, None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => address = Some(*ip),
            AddressAttribute::Broadcast(ip) => broadcast = Some(IpAddr::V4(*ip)),
            _ => {}
        }
    }
    // With a peer, `Local` is the address and `Address` the peer's; without a peer, IPv6 has only `Address`.
    let ip = local.or(address)?;
    Some(Address {
        ip,
        prefix_length: message.header.prefix_len,
        scope: message.header.scope.into(),
        peer: address.filter(|peer| *peer != ip),
        broadcast,
    })
}

/// Parses a unicast route of the main table; returns it with its interface.
fn route(message: &RouteMessage) -> Result<Option<(u32, Route)>, Unsuitable> {
    let header = &message.header;
    let mut table = u32::from(header.table);
    let unspecified = match u8::from(header.address_family) {
        FAMILY_INET => IpAddr::from([0; 4]),
        FAMILY_INET6 => IpAddr::from([0; 16]),
        _ => return Ok(None),
    };
    let mut route = Route {
        destination: unspecified,
        prefix_length: header.destination_prefix_length,
        gateway: None,
        source: None,
        metric: 0,
        scope: header.scope.into(),
        on_link: header.flags.contains(RouteFlags::Onlink),
        mtu: 0,
    };
    let (mut out, mut special) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::Destination(to) => route.destination = ip(to).unwrap_or(unspecified),
            RouteAttribute::Gateway(by) => route.gateway = ip(by),
            RouteAttribute::PrefSource(from) => route.source = ip(from),
            RouteAttribute::Priority(metric) => route.metric = *metric,
            RouteAttribute::Oif(index) => out = Some(*index),
            RouteAttribute::Metrics(metrics) => {
                route.mtu = metrics.iter().find_map(mtu_of).unwrap_or_default();
            }
            RouteAttribute::MultiPath(_) => special = Some("several gateways"),
            RouteAttribute::Via(_) => special = Some("a gateway of the other family"),
            RouteAttribute::Encap(_) => special = Some("a tunnel"),
            _ => {}
        }
    }
    if table != u32::from(RouteHeader::RT_TABLE_MAIN)
        || header.kind != RouteType::Unicast
        || header.flags.contains(RouteFlags::Cloned)
    {
        return Ok(None);
    }
    if let Some(how) = special {
        let to = format!("{}/{}", route.destination, route.prefix_length);
        return Err(Unsuitable::Route { to, how });
    }
    Ok(out.map(|index| (index, route)))
}

const FAMILY_INET: u8 = libc::AF_INET as u8;
const FAMILY_INET6: u8 = libc::AF_INET6 as u8;

fn mtu_of(metric: &RouteMetric) -> Option<u32> {
    match metric {
        RouteMetric::Mtu(mtu) => Some(*mtu),
        _ => None,
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

/// Parses a neighbour entry; `None` unless it is permanent: the guest will learn the others.
fn neighbour(message: &NeighbourMessage) -> Option<Neighbour> {
    if message.header.state != NeighbourState::Permanent {
        return None;
    }
    let (mut ip, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => ip = Some(IpAddr::V4(*v4)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => ip = Some(IpAddr::V6(*v6)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = bytes.as_slice().try_into().ok().map(Mac),
            _ => {}
        }
    }
    Some(Neighbour { ip: ip?, mac: mac? })
}

/// Converts an interface for the guest, which applies it to its network device number `nic`.
pub fn for_guest(nic: u32, interface: &Interface) -> wire::Interface {
    let address = |address: &Address| wire::Address {
        ip: octets(address.ip),
        prefix_length: address.prefix_length.into(),
        scope: address.scope.into(),
        peer: address.peer.map(octets).unwrap_or_default(),
        broadcast: address.broadcast.map(octets).unwrap_or_default(),
        ..Default::default()
    };
    let route = |route: &Route| wire::Route {
        destination: octets(route.destination),
        prefix_length: route.prefix_length.into(),
        gateway: route.gateway.map(octets).unwrap_or_default(),
        source: route.source.map(octets).unwrap_or_default(),
        metric: route.metric,
        scope: route.scope.into(),
        on_link: route.on_link,
        mtu: route.mtu,
        ..Default::default()
    };
    let neighbour = |neighbour: &Neighbour| wire::Neighbour {
        ip: octets(neighbour.ip),
        mac: neighbour.mac.0.to_vec(),
        ..Default::default()
    };
    // Routes without a gateway come first: they make gateways reachable.
    let mut routes: Vec<&Route> = interface.routes.iter().collect();
    routes.sort_by_key(|route| route.gateway.is_some());
    wire::Interface {
        nic,
        name: interface.name.clone(),
        mac: interface.mac.0.to_vec(),
        mtu: interface.mtu,
        addresses: interface.addresses.iter().map(address).collect(),
        routes: routes.into_iter().map(route).collect(),
        neighbours: interface.neighbours.iter().map(neighbour).collect(),
        ..Default::default()
    }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests;
