//! What is done with devices of the calling thread's network namespace.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use sandboxer_netlink::{
    NLM_F_CREATE, NLM_F_EXCL, Netlink,
    packet::{
        RouteNetlinkMessage,
        link::{
            AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute,
            LinkFlags, LinkInfo, LinkMessage,
        },
        tc::{
            TcAction, TcActionAttribute, TcActionMirror, TcActionMirrorOption, TcActionOption, TcActionType,
            TcAttribute, TcFilterU32, TcFilterU32Option, TcHandle, TcMessage, TcMirror, TcMirrorActionType,
            TcOption, TcU32Key, TcU32Selector, TcU32SelectorFlags,
        },
    },
};

/// `ETH_P_ALL` in network byte order, as a filter's header has it.
const ALL_PROTOCOLS: u16 = (libc::ETH_P_ALL as u16).to_be();

/// Everything that comes in at either of two devices goes out at the other one.
pub fn join(netlink: &mut Netlink, one: u32, other: u32) -> io::Result<()> {
    for (from, to) in [(one, other), (other, one)] {
        redirect(netlink, from, to)?;
    }
    Ok(())
}

/// Whatever comes in at `from` goes out at `to`, before this namespace's own stack sees it.
///
/// As `tc qdisc add dev FROM ingress; tc filter add dev FROM ingress u32 match u8 0 0 action mirred egress
/// redirect dev TO`. `matchall` would say it in fewer words, and not every kernel has it.
fn redirect(netlink: &mut Netlink, from: u32, to: u32) -> io::Result<()> {
    let mut qdisc = TcMessage::with_index(from.cast_signed());
    qdisc.header.parent = TcHandle::INGRESS;
    qdisc.header.handle = TcHandle { major: 0xffff, minor: 0 };
    qdisc.attributes.push(TcAttribute::Kind("ingress".to_owned()));
    let added =
        netlink.request(RouteNetlinkMessage::NewQueueDiscipline(qdisc.clone()), NLM_F_CREATE | NLM_F_EXCL);
    match added {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            // Of a machine that did not become the pod's: its filter leads nowhere.
            netlink.request(RouteNetlinkMessage::DelQueueDiscipline(qdisc.clone()), 0)?;
            netlink.request(RouteNetlinkMessage::NewQueueDiscipline(qdisc), NLM_F_CREATE | NLM_F_EXCL)?;
        }
        added => added?,
    }

    let mut everything = TcU32Selector::default();
    everything.flags = TcU32SelectorFlags::Terminal;
    everything.nkeys = 1;
    everything.keys = vec![TcU32Key::default()];
    let mut mirror = TcMirror::default();
    mirror.generic.action = TcActionType::Stolen;
    mirror.eaction = TcMirrorActionType::EgressRedir;
    mirror.ifindex = to;
    let mut action = TcAction::default();
    action.attributes = vec![
        TcActionAttribute::Kind(TcActionMirror::KIND.to_owned()),
        TcActionAttribute::Options(vec![TcActionOption::Mirror(TcActionMirrorOption::Parms(mirror))]),
    ];
    let mut filter = TcMessage::with_index(from.cast_signed());
    filter.header.parent = TcHandle { major: 0xffff, minor: 0 };
    // Priority 0: the kernel chooses one.
    filter.header.info = TcHandle { major: 0, minor: ALL_PROTOCOLS }.into();
    filter.attributes.push(TcAttribute::Kind(TcFilterU32::KIND.to_owned()));
    filter.attributes.push(TcAttribute::Options(
        [TcFilterU32Option::Selector(everything), TcFilterU32Option::Action(vec![action])]
            .map(TcOption::U32)
            .into(),
    ));
    netlink.request(RouteNetlinkMessage::NewTrafficFilter(filter), NLM_F_CREATE | NLM_F_EXCL)
}

/// Index of a device that was just made, which comes up with this MTU.
pub fn bring_up(netlink: &mut Netlink, name: &str, mtu: u32) -> io::Result<u32> {
    let index = nix::net::if_::if_nametoindex(name)?;
    be_mute(netlink, index)?;
    set_up(netlink, index, mtu)?;
    Ok(index)
}

/// A device comes up with this MTU.
pub fn set_up(netlink: &mut Netlink, index: u32, mtu: u32) -> io::Result<()> {
    let mut up = LinkMessage::default();
    up.header.index = index;
    up.header.flags = LinkFlags::Up;
    up.header.change_mask = LinkFlags::Up;
    up.attributes.push(LinkAttribute::Mtu(mtu));
    netlink.request(RouteNetlinkMessage::SetLink(up), 0)
}

/// Keeps this namespace's own stack from taking an IPv6 address on a device, and so from talking to the guest.
fn be_mute(netlink: &mut Netlink, index: u32) -> io::Result<()> {
    let mut mute = LinkMessage::default();
    mute.header.index = index;
    let none = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    mute.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![none])]));
    match netlink.request(RouteNetlinkMessage::SetLink(mute), 0) {
        // A host without IPv6, or an MTU too small for it.
        Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(()),
        done => done,
    }
}

/// Makes a cable from a new device `here` to a new device `there` in another namespace.
pub fn cable(netlink: &mut Netlink, here: &str, there: (&str, BorrowedFd<'_>), mtu: u32) -> io::Result<()> {
    let mut peer = LinkMessage::default();
    let (name, namespace) = there;
    peer.attributes.extend([
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::NetNsFd(namespace.as_raw_fd()),
        LinkAttribute::Mtu(mtu),
    ]);
    let mut cable = LinkMessage::default();
    cable.attributes.extend([
        LinkAttribute::IfName(here.to_owned()),
        LinkAttribute::Mtu(mtu),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]),
    ]);
    netlink.request(RouteNetlinkMessage::NewLink(cable), NLM_F_CREATE | NLM_F_EXCL)
}

/// Removes a device, if there is one of this name.
pub fn remove(netlink: &mut Netlink, name: &str) -> io::Result<()> {
    let Ok(index) = nix::net::if_::if_nametoindex(name) else { return Ok(()) };
    let mut old = LinkMessage::default();
    old.header.index = index;
    netlink.request(RouteNetlinkMessage::DelLink(old), 0)
}
