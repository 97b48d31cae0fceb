use std::net::Ipv4Addr;

use sandboxer_netlink::packet::{AddressFamily, route::RouteNextHop};

use super::*;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];

fn link(index: u32, name: &str, flags: LinkFlags) -> RouteNetlinkMessage {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.link_layer_type = LinkLayerType::Ether;
    link.header.flags = flags;
    link.attributes.extend([
        LinkAttribute::IfName(name.into()),
        LinkAttribute::Mtu(1450),
        LinkAttribute::Address(MAC.to_vec()),
    ]);
    RouteNetlinkMessage::NewLink(link)
}

fn added_address(index: u32, attributes: Vec<AddressAttribute>) -> RouteNetlinkMessage {
    let mut address = AddressMessage::default();
    address.header.index = index;
    address.header.prefix_len = 24;
    address.attributes = attributes;
    RouteNetlinkMessage::NewAddress(address)
}

fn added_route(attributes: Vec<RouteAttribute>) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = AddressFamily::Inet;
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.kind = RouteType::Unicast;
    route.attributes = attributes;
    route
}

#[test]
fn an_interface_gets_what_is_its_own_and_nothing_else_is_one() {
    let (ip, router) = (Ipv4Addr::new(192, 0, 2, 7), Ipv4Addr::new(192, 0, 2, 1));
    let mut learnt = NeighbourMessage::default();
    learnt.header.ifindex = 2;
    learnt.header.state = NeighbourState::Reachable;
    learnt.attributes.extend([
        NeighbourAttribute::Destination(NeighbourAddress::Inet(router)),
        NeighbourAttribute::LinkLayerAddress(MAC.to_vec()),
    ]);
    let mut noted = learnt.clone();
    noted.header.state = NeighbourState::Permanent;
    let mut local = added_route(vec![RouteAttribute::Oif(2), RouteAttribute::Table(255)]);
    local.header.table = 255;
    let found = interfaces(vec![
        link(1, "lo", LinkFlags::Up | LinkFlags::Loopback),
        link(2, "eth0", LinkFlags::Up),
        link(3, "tunl0", LinkFlags::empty()),
        link(4, "sbx-2", LinkFlags::Up),
        added_address(1, vec![AddressAttribute::Local(IpAddr::from([127, 0, 0, 1]))]),
        added_address(2, vec![AddressAttribute::Local(ip.into()), AddressAttribute::Address(ip.into())]),
        RouteNetlinkMessage::NewRoute(added_route(vec![
            RouteAttribute::Gateway(RouteAddress::Inet(router)),
            RouteAttribute::Oif(2),
            RouteAttribute::Priority(5),
            RouteAttribute::Metrics(vec![RouteMetric::Mtu(1400)]),
        ])),
        RouteNetlinkMessage::NewRoute(local),
        RouteNetlinkMessage::NewNeighbour(learnt),
        RouteNetlinkMessage::NewNeighbour(noted),
    ]);
    let expected = Interface {
        index: 2,
        name: "eth0".into(),
        mac: Mac(MAC),
        mtu: 1450,
        addresses: vec![Address { ip: ip.into(), prefix_length: 24, scope: 0, peer: None, broadcast: None }],
        routes: vec![Route {
            destination: IpAddr::from([0; 4]),
            prefix_length: 0,
            gateway: Some(router.into()),
            source: None,
            metric: 5,
            scope: 0,
            on_link: false,
            mtu: 1400,
        }],
        neighbours: vec![Neighbour { ip: router.into(), mac: Mac(MAC) }],
    };
    assert_eq!(found.unwrap(), [expected]);
}

#[test]
fn a_peer_is_told_from_the_address_itself_in_both_families() {
    let (ours, peer) = (IpAddr::from([192, 0, 2, 7]), IpAddr::from([192, 0, 2, 1]));
    let v6: IpAddr = "2001:db8::7".parse().unwrap();
    let between = [AddressAttribute::Address(peer), AddressAttribute::Local(ours)];
    let alone = [AddressAttribute::Address(v6)];
    let read = |attributes: &[AddressAttribute]| {
        let mut message = AddressMessage::default();
        message.attributes = attributes.to_vec();
        address(&message).map(|address| (address.ip, address.peer))
    };
    assert_eq!(read(&between), Some((ours, Some(peer))));
    assert_eq!(read(&alone), Some((v6, None)));
    assert_eq!(read(&[]), None);
}

#[test]
fn what_a_vm_cannot_have_is_refused_by_name() {
    let mut tunnel = LinkMessage::default();
    tunnel.header.flags = LinkFlags::Up;
    tunnel.attributes.push(LinkAttribute::IfName("tun0".into()));
    let tunnel = interfaces(vec![RouteNetlinkMessage::NewLink(tunnel)]).unwrap_err();
    assert_eq!(tunnel, Unsuitable::NotEthernet("tun0".into()));

    let many = (2..12).map(|index| link(index, &format!("net{index}"), LinkFlags::Up)).collect();
    assert_eq!(interfaces(many).unwrap_err(), Unsuitable::TooManyInterfaces);

    let ip = AddressAttribute::Local(IpAddr::from([192, 0, 2, 7]));
    let mut flood = vec![link(2, "eth0", LinkFlags::Up)];
    flood.extend((0..=MAX_OF_EACH).map(|_| added_address(2, vec![ip.clone()])));
    let text = interfaces(flood).unwrap_err().to_string();
    assert!(text.contains("addresses") && text.contains("eth0"), "{text}");

    let several = RouteAttribute::MultiPath(vec![RouteNextHop::default()]);
    let text = route(&added_route(vec![several])).unwrap_err().to_string();
    assert!(text.contains("0.0.0.0/0") && text.contains("several gateways"), "{text}");
}

#[test]
fn the_guest_is_told_first_what_others_are_reached_by() {
    let route = |gateway: Option<[u8; 4]>| Route {
        destination: IpAddr::from([0; 4]),
        prefix_length: 0,
        gateway: gateway.map(IpAddr::from),
        source: None,
        metric: 0,
        scope: 0,
        on_link: true,
        mtu: 0,
    };
    let config = for_guest(
        3,
        &Interface {
            index: 2,
            name: "net1".into(),
            mac: Mac(MAC),
            mtu: 9000,
            addresses: Vec::new(),
            routes: vec![route(Some([169, 254, 1, 1])), route(None)],
            neighbours: Vec::new(),
        },
    );
    assert_eq!((config.nic, config.mtu, config.mac), (3, 9000, MAC.to_vec()));
    assert!(config.routes[0].gateway.is_empty() && config.routes[1].gateway == [169, 254, 1, 1]);
    assert!(config.routes[1].on_link);
}
