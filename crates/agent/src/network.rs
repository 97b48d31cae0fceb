//! The pod's network interfaces: configures names, addresses and routes of the VM's network devices.
//!
//! The configuration of the host's namespace is copied without additions: prefix routes are among the given routes, an
//! address already belongs to the pod and needs no duplicate detection, and router advertisements are ignored.

use std::{collections::BTreeMap, fs, io, net::IpAddr, path::Path, time::Duration};

use sandboxer_netlink::{
    Link, NLM_F_CREATE, NLM_F_REPLACE, Netlink,
    packet::{
        AddressFamily, RouteNetlinkMessage as Message,
        address::{AddressAttribute, AddressFlags, AddressMessage},
        link::{AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags, LinkMessage},
        neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState},
        route::{
            RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteProtocol, RouteType,
        },
    },
};
use sandboxer_protocol::{agent as wire, boot::first_mac};

use crate::{
    failure::{Failure, Kind, internal},
    uevent,
};

/// How long a network device may take to appear.
const DEADLINE: Duration = Duration::from_secs(10);

/// Length of an Ethernet address, bytes.
const MAC_LEN: usize = 6;

/// The index of the loopback interface, the first one of each network namespace.
const LOOPBACK: u32 = 1;

/// Brings the loopback interface up.
pub fn loopback_up() -> io::Result<()> {
    set_up(&mut Netlink::open()?, LOOPBACK, true)
}

/// Configures the VM's network devices as these interfaces, and clears or removes the others.
pub async fn configure(interfaces: &[wire::Interface], removes_others: bool) -> Result<(), Failure> {
    let mut netlink = Netlink::open().map_err(internal("cannot open an rtnetlink socket"))?;
    let mut nics = nics(&mut netlink).map_err(internal("cannot list network devices"))?;
    if let Some(last) = interfaces.iter().map(|interface| interface.nic).max()
        && !nics.contains_key(&last)
    {
        nics = appeared(&mut netlink, last).await?;
    }
    clear(&mut netlink, &nics).map_err(internal("cannot clear network devices"))?;
    if removes_others {
        let is_other = |number: u32| !interfaces.iter().any(|interface| interface.nic == number);
        for (_, nic) in nics.iter().filter(|&(&number, _)| is_other(number)) {
            remove(nic).map_err(internal(format!("cannot remove network device {}", nic.name)))?;
        }
    }
    make_way(&mut netlink, &nics, interfaces).map_err(internal("cannot rename network devices"))?;
    let devices = interfaces
        .iter()
        .map(|interface| match nics.get(&interface.nic) {
            Some(nic) => Ok((nic, interface)),
            None => Err(Failure::invalid(format!("interface {:?}: no such network device", interface.name))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    // Each step is done for all devices at a time: a route's source may be another device's address, and a name may
    // have belonged to another device.
    let steps: [(&str, Step); 4] =
        [("name", rename), ("set up", set_link), ("address", add_addresses), ("route by", add_routes)];
    for (attempt, step) in steps {
        for (nic, interface) in &devices {
            step(&mut netlink, nic, interface)
                .map_err(internal(format!("cannot {attempt} network interface {:?}", interface.name)))?;
        }
    }
    Ok(())
}

type Step = fn(&mut Netlink, &Link, &wire::Interface) -> io::Result<()>;

/// Returns the VM's network devices by number, which is in the permanent address that the host set. The current address
/// does not matter.
fn nics(netlink: &mut Netlink) -> io::Result<BTreeMap<u32, Link>> {
    let numbered = |link: Link| {
        let number = (0..=u8::MAX).find(|&number| link.permanent_address == first_mac(number))?;
        Some((number.into(), link))
    };
    Ok(netlink.links()?.into_iter().filter_map(numbered).collect())
}

async fn appeared(netlink: &mut Netlink, last: u32) -> Result<BTreeMap<u32, Link>, Failure> {
    let appearance = uevent::wait_for(&["net"], Some(DEADLINE), || {
        // A failed listing is retried at the next uevent.
        nics(netlink).ok().filter(|nics| nics.contains_key(&last))
    });
    appearance.await.map_err(internal("cannot listen for network devices"))?.ok_or_else(|| {
        let seconds = DEADLINE.as_secs();
        Failure::new(
            Kind::DeadlineExceeded,
            format!("network device {last} did not appear within {seconds} s"),
        )
    })
}

/// Removes an earlier configuration from the devices. Setting a device down removes its routes and neighbours. A device
/// that is down has no configuration, since it is set down last.
fn clear(netlink: &mut Netlink, nics: &BTreeMap<u32, Link>) -> io::Result<()> {
    let up: Vec<u32> = nics.values().filter(|nic| nic.up).map(|nic| nic.index).collect();
    if up.is_empty() {
        return Ok(());
    }
    for message in netlink.dump(Message::GetAddress(AddressMessage::default()))? {
        let Message::NewAddress(address) = message else { continue };
        if up.contains(&address.header.index) {
            match netlink.request(Message::DelAddress(address), 0) {
                // The kernel removed it together with another one.
                Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {}
                result => result?,
            }
        }
    }
    up.into_iter().try_for_each(|index| set_up(netlink, index, false))
}

/// Takes a network card from its driver: the guest has no such device any more.
fn remove(nic: &Link) -> io::Result<()> {
    // The kernel gave the name, so the path cannot lead elsewhere.
    let card = Path::new("/sys/class/net").join(&nic.name).join("device");
    let name = fs::canonicalize(&card)?;
    let name = name.file_name().ok_or(io::ErrorKind::NotFound)?;
    fs::write(card.join("driver/unbind"), name.as_encoded_bytes())
}

/// Renames devices that have the name of another interface. A device that already has its name keeps it: a
/// rename recreates the device's sysctls.
fn make_way(
    netlink: &mut Netlink,
    nics: &BTreeMap<u32, Link>,
    interfaces: &[wire::Interface],
) -> io::Result<()> {
    for (number, nic) in nics {
        if interfaces.iter().any(|interface| interface.name == nic.name && interface.nic != *number) {
            set(netlink, nic.index, [LinkAttribute::IfName(format!("nic{number}"))])?;
        }
    }
    Ok(())
}

fn set(
    netlink: &mut Netlink,
    index: u32,
    attributes: impl IntoIterator<Item = LinkAttribute>,
) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.attributes.extend(attributes);
    netlink.request(Message::SetLink(link), 0)
}

fn set_up(netlink: &mut Netlink, index: u32, up: bool) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
    link.header.change_mask = LinkFlags::Up;
    netlink.request(Message::SetLink(link), 0)
}

fn rename(netlink: &mut Netlink, nic: &Link, interface: &wire::Interface) -> io::Result<()> {
    if nic.name == interface.name {
        return Ok(());
    }
    set(netlink, nic.index, [LinkAttribute::IfName(interface.name.clone())])
}

fn set_link(netlink: &mut Netlink, nic: &Link, interface: &wire::Interface) -> io::Result<()> {
    // The kernel generates no address: the pod's link-local one is among the given addresses.
    let no_own = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    let attributes = [
        LinkAttribute::Address(mac(&interface.mac)?.to_vec()),
        LinkAttribute::Mtu(interface.mtu),
        LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![no_own])]),
    ];
    // Without IPv6 (an MTU can be too small for it), the kernel rejects the last attribute, and the others with it.
    match set(netlink, nic.index, attributes.clone()) {
        Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {
            set(netlink, nic.index, attributes.into_iter().take(2))?;
        }
        result => {
            result?;
            // The kernel has accepted the name, so the path cannot lead elsewhere.
            fs::write(format!("/proc/sys/net/ipv6/conf/{}/accept_ra", interface.name), "0")?;
        }
    }
    set_up(netlink, nic.index, true)
}

fn add_addresses(netlink: &mut Netlink, nic: &Link, interface: &wire::Interface) -> io::Result<()> {
    for address in &interface.addresses {
        let ip = ip(&address.ip)?;
        let mut message = AddressMessage::default();
        message.header.family = family(ip);
        message.header.index = nic.index;
        message.header.prefix_len = small(address.prefix_length)?;
        message.header.scope = small(address.scope)?.into();
        let far = optional_ip(&address.peer)?.unwrap_or(ip);
        message.attributes.extend([
            AddressAttribute::Local(ip),
            AddressAttribute::Address(far),
            AddressAttribute::Flags(AddressFlags::Nodad | AddressFlags::Noprefixroute),
        ]);
        if let Some(IpAddr::V4(broadcast)) = optional_ip(&address.broadcast)? {
            message.attributes.push(AddressAttribute::Broadcast(broadcast));
        }
        netlink.request(Message::NewAddress(message), NLM_F_CREATE | NLM_F_REPLACE)?;
    }
    Ok(())
}

fn add_routes(netlink: &mut Netlink, nic: &Link, interface: &wire::Interface) -> io::Result<()> {
    // Added before the routes, so that the first packet to a gateway finds its neighbour entry.
    for neighbour in &interface.neighbours {
        let ip = ip(&neighbour.ip)?;
        let mut message = NeighbourMessage::default();
        message.header.family = family(ip);
        message.header.ifindex = nic.index;
        message.header.state = NeighbourState::Permanent;
        message.attributes.extend([
            NeighbourAttribute::Destination(match ip {
                IpAddr::V4(ip) => NeighbourAddress::Inet(ip),
                IpAddr::V6(ip) => NeighbourAddress::Inet6(ip),
            }),
            NeighbourAttribute::LinkLayerAddress(mac(&neighbour.mac)?.to_vec()),
        ]);
        netlink.request(Message::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE)?;
    }
    for wire_route in &interface.routes {
        let message = route(nic.index, wire_route)?;
        netlink.request(Message::NewRoute(message), NLM_F_CREATE | NLM_F_REPLACE)?;
    }
    Ok(())
}

fn route(index: u32, wire_route: &wire::Route) -> io::Result<RouteMessage> {
    let destination = ip(&wire_route.destination)?;
    let mut message = RouteMessage::default();
    message.header.address_family = family(destination);
    message.header.destination_prefix_length = small(wire_route.prefix_length)?;
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Static;
    message.header.scope = small(wire_route.scope)?.into();
    message.header.kind = RouteType::Unicast;
    if wire_route.on_link {
        message.header.flags = RouteFlags::Onlink;
    }
    message.attributes.push(RouteAttribute::Oif(index));
    if wire_route.prefix_length > 0 {
        message.attributes.push(RouteAttribute::Destination(destination.into()));
    }
    if let Some(gateway) = optional_ip(&wire_route.gateway)? {
        message.attributes.push(RouteAttribute::Gateway(gateway.into()));
    }
    if let Some(source) = optional_ip(&wire_route.source)? {
        message.attributes.push(RouteAttribute::PrefSource(source.into()));
    }
    if wire_route.metric > 0 {
        message.attributes.push(RouteAttribute::Priority(wire_route.metric));
    }
    if wire_route.mtu > 0 {
        message.attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(wire_route.mtu)]));
    }
    Ok(message)
}

fn family(ip: IpAddr) -> AddressFamily {
    match ip {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn ip(bytes: &[u8]) -> io::Result<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4().or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).map_err(malformed)
}

fn optional_ip(bytes: &[u8]) -> io::Result<Option<IpAddr>> {
    if bytes.is_empty() { Ok(None) } else { ip(bytes).map(Some) }
}

fn mac(bytes: &[u8]) -> io::Result<[u8; MAC_LEN]> {
    bytes.try_into().map_err(malformed)
}

fn small(number: u32) -> io::Result<u8> {
    number.try_into().map_err(malformed)
}

fn malformed(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_route_names_no_destination_and_others_do() {
        let wire_route = wire::Route {
            destination: vec![0; 4],
            gateway: vec![169, 254, 1, 1],
            on_link: true,
            ..Default::default()
        };
        let default = route(7, &wire_route).unwrap();
        assert_eq!(default.header.flags, RouteFlags::Onlink);
        let expected =
            [RouteAttribute::Oif(7), RouteAttribute::Gateway(IpAddr::from([169, 254, 1, 1]).into())];
        assert_eq!(default.attributes, expected);

        let wire_route =
            wire::Route { destination: vec![0; 16], prefix_length: 8, metric: 256, ..Default::default() };
        let other = route(7, &wire_route).unwrap();
        assert!(other.attributes.contains(&RouteAttribute::Destination(IpAddr::from([0; 16]).into())));
        assert!(other.attributes.contains(&RouteAttribute::Priority(256)));
    }

    #[test]
    fn addresses_of_odd_length_are_refused() {
        for bytes in [&[1, 2, 3][..], &[0; 17]] {
            assert_eq!(ip(bytes).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            assert_eq!(mac(bytes).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        assert_eq!(optional_ip(&[]).unwrap(), None);
        assert!(small(256).is_err());
    }
}
