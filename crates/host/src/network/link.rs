//! Operations on devices of the calling thread's network namespace.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use sandboxer_bpf::Program;
use sandboxer_netlink::{
    DefaultNla, NLM_F_CREATE, NLM_F_EXCL, Netlink,
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

use super::egress::program::Programs;

/// `ETH_P_ALL` in network byte order, as in a filter's header.
const ALL_PROTOCOLS: u16 = (libc::ETH_P_ALL as u16).to_be();

/// The priority of this daemon's filters, by which they are recognized later. The kernel gives filters without a
/// priority 0xc000 and less.
const PRIORITY: u16 = 0xdb0f;

/// The priority of programs that decide about packets, before the redirection.
const PROGRAM_PRIORITY: u16 = PRIORITY - 1;

// Attributes of linux/pkt_cls.h: a program's descriptor and name, and that its result is what happens to the packet.
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;

/// The command that loads the kernel modules of [`join`] and of limits where they are not loaded automatically.
pub const MODPROBE: &str = "modprobe -a sch_ingress cls_u32 act_mirred sch_tbf cls_bpf";

/// Connects two devices: every packet that arrives at one leaves by the other.
pub fn join(netlink: &mut Netlink, one: u32, other: u32) -> io::Result<()> {
    redirect(netlink, one, other, None)?;
    redirect(netlink, other, one, None)
}

/// Connects a pod's interface and the device of its guest, as far as programs allow.
pub fn join_filtered(
    netlink: &mut Netlink,
    interface: u32,
    device: u32,
    Programs { inbound, outbound }: &Programs,
) -> io::Result<()> {
    redirect(netlink, device, interface, Some(outbound))?;
    redirect(netlink, interface, device, Some(inbound))
}

/// Redirects every packet that arrives at `from` to `to`, before this namespace's own network stack. A program decides before
/// that.
///
/// Same as `tc qdisc add dev FROM ingress; tc filter add dev FROM ingress u32 match u8 0 0 action mirred
/// egress redirect dev TO`. `matchall` would be simpler, but not every kernel has it.
fn redirect(netlink: &mut Netlink, from: u32, to: u32, program: Option<&Program>) -> io::Result<()> {
    let mut qdisc = TcMessage::with_index(from.cast_signed());
    qdisc.header.parent = TcHandle::INGRESS;
    qdisc.header.handle = TcHandle { major: 0xffff, minor: 0 };
    qdisc.attributes.push(TcAttribute::Kind("ingress".to_owned()));
    let added =
        netlink.request(RouteNetlinkMessage::NewQueueDiscipline(qdisc.clone()), NLM_F_CREATE | NLM_F_EXCL);
    match added {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            if !is_ours(netlink, from)? {
                return Err(not_ours(from));
            }
            // A qdisc may remain of a VM that failed before it became the pod's: its filter has no target.
            netlink.request(RouteNetlinkMessage::DelQueueDiscipline(qdisc.clone()), 0)?;
            netlink.request(RouteNetlinkMessage::NewQueueDiscipline(qdisc), NLM_F_CREATE | NLM_F_EXCL)?;
        }
        added => added.map_err(|error| unknown("the ingress queueing discipline (sch_ingress)", error))?,
    }

    if let Some(program) = program {
        decide_by(netlink, from, program)?;
    }
    redirect_with(netlink, from, to, PRIORITY)
}

/// Lets a program decide about each packet that arrives at a device. The filter keeps the program.
fn decide_by(netlink: &mut Netlink, index: u32, program: &Program) -> io::Result<()> {
    let mut filter = TcMessage::with_index(index.cast_signed());
    filter.header.parent = TcHandle { major: 0xffff, minor: 0 };
    filter.header.info = TcHandle { major: PROGRAM_PRIORITY, minor: ALL_PROTOCOLS }.into();
    filter.attributes.push(TcAttribute::Kind("bpf".to_owned()));
    let options = [
        (TCA_BPF_FD, program.as_raw_fd().to_ne_bytes().to_vec()),
        (TCA_BPF_NAME, b"sandboxer\0".to_vec()),
        (TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes().to_vec()),
    ];
    let options = options.map(|(kind, value)| TcOption::Other(DefaultNla::new(kind, value)));
    filter.attributes.push(TcAttribute::Options(options.into()));
    netlink
        .request(RouteNetlinkMessage::NewTrafficFilter(filter), NLM_F_CREATE | NLM_F_EXCL)
        .map_err(|error| unknown("the BPF filter (cls_bpf)", error))
}

/// Adds the filter with this priority.
fn redirect_with(netlink: &mut Netlink, from: u32, to: u32, priority: u16) -> io::Result<()> {
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
    filter.header.info = TcHandle { major: priority, minor: ALL_PROTOCOLS }.into();
    filter.attributes.push(TcAttribute::Kind(TcFilterU32::KIND.to_owned()));
    filter.attributes.push(TcAttribute::Options(
        [TcFilterU32Option::Selector(everything), TcFilterU32Option::Action(vec![action])]
            .map(TcOption::U32)
            .into(),
    ));
    netlink
        .request(RouteNetlinkMessage::NewTrafficFilter(filter), NLM_F_CREATE | NLM_F_EXCL)
        .map_err(|error| unknown("the u32 filter (cls_u32) or the redirect action (act_mirred)", error))
}

/// Adds the name of the missing kernel feature: ENOENT means that the kernel has neither code nor module of a kind.
pub(super) fn unknown(what: &str, error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::NotFound => io::Error::new(
            error.kind(),
            format!("the kernel does not have {what}: load it with `{MODPROBE}`"),
        ),
        _ => error,
    }
}

/// Returns whether the ingress filters of device `index` are only from an earlier [`join`].
fn is_ours(netlink: &mut Netlink, index: u32) -> io::Result<bool> {
    let of_device = TcMessage::with_index(index.cast_signed());
    let qdiscs = netlink.dump(RouteNetlinkMessage::GetQueueDiscipline(of_device.clone()))?;
    let ingress = qdiscs.into_iter().all(|message| match message {
        RouteNetlinkMessage::NewQueueDiscipline(qdisc) => {
            qdisc.header.index != of_device.header.index
                || qdisc.header.parent != TcHandle::INGRESS
                // `clsact` has the same handle, but also egress filters.
                || qdisc.attributes.contains(&TcAttribute::Kind("ingress".to_owned()))
        }
        _ => true,
    });
    let mut filters = of_device;
    filters.header.parent = TcHandle { major: 0xffff, minor: 0 };
    let filters = netlink.dump(RouteNetlinkMessage::GetTrafficFilter(filters))?;
    Ok(ingress
        && filters.into_iter().all(|message| match message {
            RouteNetlinkMessage::NewTrafficFilter(filter) => {
                [PRIORITY, PROGRAM_PRIORITY].contains(&TcHandle::from(filter.header.info).major)
            }
            _ => true,
        }))
}

fn not_ours(index: u32) -> io::Error {
    let name = nix::net::if_::if_indextoname(index)
        .map_or_else(|_| index.to_string(), |name| name.to_string_lossy().into_owned());
    io::Error::new(
        io::ErrorKind::AlreadyExists,
        format!(
            "interface {name:?} has an ingress or clsact qdisc of another program: the guest's packets would bypass \
             its filters; remove it, or run the pod with another runtime"
        ),
    )
}

/// Brings a new device up with this MTU; returns its index.
pub fn bring_up(netlink: &mut Netlink, name: &str, mtu: u32) -> io::Result<u32> {
    let index = nix::net::if_::if_nametoindex(name)?;
    disable_ipv6(netlink, index)?;
    set_up(netlink, index, mtu)?;
    Ok(index)
}

/// Brings a device up with this MTU.
pub fn set_up(netlink: &mut Netlink, index: u32, mtu: u32) -> io::Result<()> {
    let mut up = LinkMessage::default();
    up.header.index = index;
    up.header.flags = LinkFlags::Up;
    up.header.change_mask = LinkFlags::Up;
    up.attributes.push(LinkAttribute::Mtu(mtu));
    netlink.request(RouteNetlinkMessage::SetLink(up), 0)
}

/// Prevents this namespace's own stack from having an IPv6 address on a device, and so from talking to the guest.
fn disable_ipv6(netlink: &mut Netlink, index: u32) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = index;
    let none = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    link.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![none])]));
    match netlink.request(RouteNetlinkMessage::SetLink(link), 0) {
        // The host has no IPv6, or the MTU is too small for it.
        Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(()),
        done => done,
    }
}

/// Creates a veth pair: a new device `here` and, in another namespace, a new device `there`.
pub fn veth(netlink: &mut Netlink, here: &str, there: (&str, BorrowedFd<'_>), mtu: u32) -> io::Result<()> {
    let mut peer = LinkMessage::default();
    let (name, namespace) = there;
    peer.attributes.extend([
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::NetNsFd(namespace.as_raw_fd()),
        LinkAttribute::Mtu(mtu),
    ]);
    let mut veth = LinkMessage::default();
    veth.attributes.extend([
        LinkAttribute::IfName(here.to_owned()),
        LinkAttribute::Mtu(mtu),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]),
    ]);
    netlink.request(RouteNetlinkMessage::NewLink(veth), NLM_F_CREATE | NLM_F_EXCL)
}

/// Removes the device `name` if it exists.
///
/// Names the device in one request: looking up the index of a device that does not exist makes the kernel run modprobe
/// for it, which took 6 of the 145 virtual ms of each pod's start.
pub fn remove(netlink: &mut Netlink, name: &str) -> io::Result<()> {
    let mut old = LinkMessage::default();
    old.attributes.push(LinkAttribute::IfName(name.to_owned()));
    match netlink.request(RouteNetlinkMessage::DelLink(old), 0) {
        // The device never existed, or the kernel removed it: a tap goes when its VMM exits, which may be just now.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use std::{ffi::CStr, os::fd::OwnedFd};

    use super::super::{namespace, tap};
    use super::*;

    const ONE: &CStr = c"one";
    const TWO: &CStr = c"two";

    /// Runs `work` in a new network namespace with two taps, whose indices it passes.
    fn with_taps<T: Send>(
        work: impl FnOnce(&mut Netlink, u32, u32) -> io::Result<T> + Send,
    ) -> io::Result<T> {
        namespace::within(namespace::fresh()?, || {
            let _taps: Vec<OwnedFd> = [ONE, TWO].into_iter().map(tap::open).collect::<io::Result<_>>()?;
            let mut netlink = Netlink::open()?;
            let one = bring_up(&mut netlink, "one", 1500)?;
            let two = bring_up(&mut netlink, "two", 1500)?;
            work(&mut netlink, one, two)
        })
    }

    /// Adds an ingress qdisc of this kind, as a CNI plugin may.
    fn add_qdisc(netlink: &mut Netlink, index: u32, kind: &str) -> io::Result<()> {
        let mut qdisc = TcMessage::with_index(index.cast_signed());
        qdisc.header.parent = TcHandle::INGRESS;
        qdisc.header.handle = TcHandle { major: 0xffff, minor: 0 };
        qdisc.attributes.push(TcAttribute::Kind(kind.to_owned()));
        netlink.request(RouteNetlinkMessage::NewQueueDiscipline(qdisc), NLM_F_CREATE | NLM_F_EXCL)
    }

    #[test]
    fn a_device_is_removed_by_name_and_one_that_is_not_there_is_no_error() {
        with_taps(|netlink, one, _| {
            assert_eq!(nix::net::if_::if_nametoindex("one"), Ok(one));
            remove(netlink, "one")?;
            assert_eq!(nix::net::if_::if_nametoindex("one"), Err(nix::errno::Errno::ENODEV));
            remove(netlink, "one")
        })
        .unwrap();
    }

    #[test]
    fn an_earlier_join_is_replaced() {
        with_taps(|netlink, one, two| {
            join(netlink, one, two)?;
            join(netlink, one, two)?;
            assert!(is_ours(netlink, one)?);
            let filters = {
                let mut query = TcMessage::with_index(one.cast_signed());
                query.header.parent = TcHandle { major: 0xffff, minor: 0 };
                netlink.dump(RouteNetlinkMessage::GetTrafficFilter(query))?
            };
            assert!(!filters.is_empty(), "the redirect is there");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_qdisc_of_somebody_elses_is_kept_and_named() {
        with_taps(|netlink, one, two| {
            add_qdisc(netlink, one, "ingress")?;
            // The same filter, with another priority.
            redirect_with(netlink, one, two, 7)?;
            let error = join(netlink, one, two).unwrap_err();
            assert!(error.to_string().contains("\"one\" has an ingress or clsact qdisc"), "{error}");
            assert!(!is_ours(netlink, one)?, "its filter is still there");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_a_kernel_lacks_is_named_with_the_command_that_loads_it() {
        let error = unknown("the ingress queueing discipline (sch_ingress)", io::ErrorKind::NotFound.into());
        let text = error.to_string();
        assert!(
            text.contains("sch_ingress") && text.contains("modprobe -a sch_ingress cls_u32 act_mirred"),
            "{text}"
        );
        assert_eq!(
            unknown("x", io::ErrorKind::PermissionDenied.into()).kind(),
            io::ErrorKind::PermissionDenied
        );
    }
}
