//! What a pod's network namespace holds, which is whatever a CNI plugin left there. The kernel frames it, and is
//! trusted with that.
#![no_main]

use std::net::{IpAddr, Ipv4Addr};

use libfuzzer_sys::fuzz_target;
use netlink_packet_route::{
    RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{LinkAttribute, LinkFlags, LinkLayerType, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteType},
};
use sandboxer_host::network::interface::{for_guest, interfaces};

fn link(index: u32, name: String, mac: Vec<u8>, flags: u32) -> RouteNetlinkMessage {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.link_layer_type = LinkLayerType::Ether;
    link.header.flags = LinkFlags::from_bits_truncate(flags);
    link.attributes.extend([LinkAttribute::IfName(name), LinkAttribute::Address(mac)]);
    RouteNetlinkMessage::NewLink(link)
}

fn address(index: u32, ip: IpAddr, peer: IpAddr, prefix: u8) -> RouteNetlinkMessage {
    let mut address = AddressMessage::default();
    address.header.index = index;
    address.header.prefix_len = prefix;
    address.attributes.extend([AddressAttribute::Local(ip), AddressAttribute::Address(peer)]);
    RouteNetlinkMessage::NewAddress(address)
}

fn route(index: u32, to: Ipv4Addr, by: Ipv4Addr, table: u8) -> RouteNetlinkMessage {
    let mut route = RouteMessage::default();
    route.header.table = table;
    route.header.kind = RouteType::Unicast;
    route.attributes.extend([
        RouteAttribute::Oif(index),
        RouteAttribute::Destination(RouteAddress::Inet(to)),
        RouteAttribute::Gateway(RouteAddress::Inet(by)),
    ]);
    RouteNetlinkMessage::NewRoute(route)
}

type Links = Vec<(u8, String, Vec<u8>, u32)>;
type Addresses = Vec<(u8, IpAddr, IpAddr, u8)>;
type Routes = Vec<(u8, Ipv4Addr, Ipv4Addr, u8)>;

fuzz_target!(|input: (Links, Addresses, Routes)| {
    let (links, addresses, routes) = input;
    // Names are the kernel's to bound: fifteen bytes.
    let links = links.into_iter().filter(|(_, name, ..)| name.len() < 16);
    let links = links.map(|(index, name, mac, flags)| link(index.into(), name, mac, flags));
    let addresses = addresses.into_iter().map(|(index, ip, peer, n)| address(index.into(), ip, peer, n));
    let routes = routes.into_iter().map(|(index, to, by, table)| route(index.into(), to, by, table));
    for interface in interfaces(links.chain(addresses).chain(routes).collect()).unwrap_or_default() {
        let told = for_guest(0, &interface);
        assert_eq!(told.mac.len(), 6);
        assert!(told.addresses.iter().all(|address| matches!(address.ip.len(), 4 | 16)));
        assert!(interface.host_device().len() < 16, "no name of an interface");
    }
});
