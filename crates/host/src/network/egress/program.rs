//! The BPF programs that decide about the packets of a pod with allowed egress.

use std::{io, net::IpAddr, os::fd::AsRawFd};

use sandboxer_bpf::{Assembly, Instruction, Kind, Label, Program, RecentMap, code::*};

use super::{Egress, Rule, Transport, mask_of};

/// The loaded programs of one interface.
#[derive(Debug)]
pub(in crate::network) struct Programs {
    /// For what comes to the pod.
    pub(in crate::network) inbound: Program,
    /// For what comes from its guest.
    pub(in crate::network) outbound: Program,
}

impl Egress {
    /// Loads the programs for one interface of a pod.
    pub(in crate::network) fn programs(&self) -> io::Result<Programs> {
        let remembered = RecentMap::new(KEY_SIZE, VALUE_SIZE, MAX_REMEMBERED)?;
        let load = |direction| Program::load(Kind::Classifier, &program(direction, &self.0, &remembered)?);
        Ok(Programs { inbound: load(Direction::Inbound)?, outbound: load(Direction::Outbound)? })
    }
}

/// The number of peers, with their ports, that a pod can answer at a time.
const MAX_REMEMBERED: u32 = 8192;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Inbound,
    Outbound,
}

// Codes of traffic control: drop the packet; go on with the next filter, which redirects it.
const DROP: i32 = 2;
const PASS: i32 = -1;

// Numbers of BPF helper functions.
const MAP_LOOKUP_ELEM: i32 = 1;
const MAP_UPDATE_ELEM: i32 = 2;
const SKB_LOAD_BYTES: i32 = 26;

/// Marks a [`LOAD_64`] as the load of a map, by its descriptor.
const OF_MAP: u8 = 1;

// Offsets in `struct __sk_buff`.
const SKB_PROTOCOL: i16 = 16;
const SKB_HAS_VLAN_TAG: i16 = 20;

// Offsets from the frame's start.
const NETWORK_HEADER: i32 = 14;
const AFTER_IPV4: i32 = NETWORK_HEADER + 20;
const AFTER_IPV6: i32 = NETWORK_HEADER + 40;

// Registers: those of the kernel's calls; and what survives calls.
const RESULT: u8 = 0;
const ARGUMENT: [u8; 4] = [1, 2, 3, 4];
const SCRATCH: u8 = 2;
const PACKET: u8 = 6;
const PROTOCOL: u8 = 7;
/// Where the header of the transport begins, which also tells IPv4 from IPv6.
const TRANSPORT: u8 = 8;
/// The remote port in this machine's byte order; [`NO_PORTS`] in a fragment after the first.
const PORT: u8 = 9;
const STACK: u8 = 10;
const NO_PORTS: i32 = -1;

// Places on the stack. A key is the remote address, the remote and the local port (for messages between neighbours a 1), and the
// protocol.
const KEY: i16 = -24;
const KEY_PORTS: i16 = KEY + 16;
const KEY_PROTOCOL: i16 = KEY + 20;
const KEY_SIZE: u32 = 24;
const VALUE: i16 = -28;
const VALUE_SIZE: u32 = 4;
const PORTS: i16 = -32;
const HEADER: i16 = -72;

/// Messages by which neighbours find each other: solicitation of routers; solicitation and advertisement of neighbours.
const NEIGHBOUR_DISCOVERY: [i32; 3] = [133, 135, 136];

/// Returns a number as the kernel has it in a packet and in the word of a register.
fn in_packet(number: u16) -> i32 {
    i32::from(number.to_be())
}

fn word(bytes: [u8; 4]) -> i32 {
    i32::from_ne_bytes(bytes)
}

fn program(direction: Direction, rules: &[Rule], remembered: &RecentMap) -> io::Result<Vec<Instruction>> {
    let mut code = Assembly::default();
    let [drop, pass, ipv4, ipv6, transport, ports, decide] = std::array::from_fn(|_| code.label());
    let is_outbound = direction == Direction::Outbound;
    let otherwise = if is_outbound { drop } else { pass };
    // Offsets of the remote address in the headers, and of the remote and the local port.
    let (remote_ipv4, remote_ipv6, remote_port, local_port) =
        if is_outbound { (16, 24, 2, 0) } else { (12, 8, 0, 2) };

    code.push(COPY, PACKET, ARGUMENT[0], 0, 0);
    if is_outbound {
        code.push(LOAD_WORD, SCRATCH, PACKET, SKB_HAS_VLAN_TAG, 0);
        code.jump_if(JUMP_IF_WORD_IS_NOT, SCRATCH, 0, drop);
    }
    code.push(LOAD_WORD, SCRATCH, PACKET, SKB_PROTOCOL, 0);
    for (protocol, label) in [(libc::ETH_P_ARP, pass), (libc::ETH_P_IP, ipv4), (libc::ETH_P_IPV6, ipv6)] {
        code.jump_if(JUMP_IF_WORD_IS, SCRATCH, in_packet(protocol as u16), label);
    }
    code.jump(otherwise);

    code.place(ipv4);
    code.push(SET, TRANSPORT, 0, 0, AFTER_IPV4);
    load(&mut code, NETWORK_HEADER, HEADER, 20, otherwise);
    code.push(LOAD_BYTE, SCRATCH, STACK, HEADER, 0);
    code.push(AND, SCRATCH, 0, 0, 0x0f);
    // With options it could be for another address than the one in its header.
    code.jump_if(JUMP_IF_WORD_IS_NOT, SCRATCH, 5, otherwise);
    for (at, part) in [[0; 4], [0; 4], [0, 0, 0xff, 0xff]].into_iter().enumerate() {
        code.push(STORE_WORD, STACK, 0, KEY + 4 * at as i16, word(part));
    }
    code.push(LOAD_WORD, SCRATCH, STACK, HEADER + remote_ipv4, 0);
    code.push(STORE_WORD_FROM, STACK, SCRATCH, KEY + 12, 0);
    code.push(STORE_WORD, STACK, 0, KEY_PORTS, 0);
    code.push(LOAD_BYTE, PROTOCOL, STACK, HEADER + 9, 0);
    code.push(SET, PORT, 0, 0, NO_PORTS);
    code.push(LOAD_HALF, SCRATCH, STACK, HEADER + 6, 0);
    code.push(BIG_ENDIAN, SCRATCH, 0, 0, 16);
    code.push(AND, SCRATCH, 0, 0, 0x1fff);
    code.jump_if(JUMP_IF_WORD_IS_NOT, SCRATCH, 0, decide);
    code.jump(transport);

    code.place(ipv6);
    code.push(SET, TRANSPORT, 0, 0, AFTER_IPV6);
    load(&mut code, NETWORK_HEADER, HEADER, 40, otherwise);
    for at in (0..16).step_by(4) {
        code.push(LOAD_WORD, SCRATCH, STACK, HEADER + remote_ipv6 + at, 0);
        code.push(STORE_WORD_FROM, STACK, SCRATCH, KEY + at, 0);
    }
    code.push(STORE_WORD, STACK, 0, KEY_PORTS, 0);
    code.push(LOAD_BYTE, PROTOCOL, STACK, HEADER + 6, 0);
    neighbour_discovery(&mut code, is_outbound, (transport, otherwise, pass));

    code.place(transport);
    code.push(SET, PORT, 0, 0, 0);
    code.jump_if(JUMP_IF_WORD_IS, PROTOCOL, libc::IPPROTO_TCP, ports);
    code.jump_if(JUMP_IF_WORD_IS_NOT, PROTOCOL, libc::IPPROTO_UDP, decide);
    code.place(ports);
    code.push(COPY, ARGUMENT[1], TRANSPORT, 0, 0);
    load_at_argument(&mut code, PORTS, 4, otherwise);
    code.push(LOAD_HALF, SCRATCH, STACK, PORTS + local_port, 0);
    code.push(STORE_HALF_FROM, STACK, SCRATCH, KEY_PORTS + 2, 0);
    code.push(LOAD_HALF, PORT, STACK, PORTS + remote_port, 0);
    code.push(STORE_HALF_FROM, STACK, PORT, KEY_PORTS, 0);
    code.push(BIG_ENDIAN, PORT, 0, 0, 16);

    code.place(decide);
    code.push(STORE_WORD_FROM, STACK, PROTOCOL, KEY_PROTOCOL, 0);
    if is_outbound {
        for rule in rules {
            pass_if_allowed(&mut code, rule, pass);
        }
    }
    map_and_key(&mut code, remembered);
    code.push(CALL, 0, 0, 0, MAP_LOOKUP_ELEM);
    code.jump_if(JUMP_IF_NOT, RESULT, 0, pass);
    if !is_outbound {
        code.push(STORE_WORD, STACK, 0, VALUE, 0);
        map_and_key(&mut code, remembered);
        code.push(COPY, ARGUMENT[2], STACK, 0, 0);
        code.push(ADD, ARGUMENT[2], 0, 0, VALUE.into());
        code.push(SET, ARGUMENT[3], 0, 0, 0);
        code.push(CALL, 0, 0, 0, MAP_UPDATE_ELEM);
        code.jump(pass);
    }
    // The kernel refuses a program with a part that is never reached.
    if is_outbound {
        code.place(drop);
        code.push(SET, RESULT, 0, 0, DROP);
        code.push(EXIT, 0, 0, 0, 0);
    }
    code.place(pass);
    code.push(SET, RESULT, 0, 0, PASS);
    code.push(EXIT, 0, 0, 0, 0);
    code.finish()
}

/// Reads a part of the frame to a place on the stack.
fn load(code: &mut Assembly, at: i32, to: i16, length: i32, failed: Label) {
    code.push(SET, ARGUMENT[1], 0, 0, at);
    load_at_argument(code, to, length, failed);
}

/// The same; its second argument says where the part begins.
fn load_at_argument(code: &mut Assembly, to: i16, length: i32, failed: Label) {
    code.push(COPY, ARGUMENT[0], PACKET, 0, 0);
    code.push(COPY, ARGUMENT[2], STACK, 0, 0);
    code.push(ADD, ARGUMENT[2], 0, 0, to.into());
    code.push(SET, ARGUMENT[3], 0, 0, length);
    code.push(CALL, 0, 0, 0, SKB_LOAD_BYTES);
    code.jump_if(JUMP_IF_NOT, RESULT, 0, failed);
}

/// Tells what finds neighbours from other messages: whoever looks for the pod gets only such an answer. Passes it at once to addresses
/// that no router forwards to: fe80::/10 and ff02::/16.
fn neighbour_discovery(
    code: &mut Assembly,
    is_outbound: bool,
    (transport, otherwise, pass): (Label, Label, Label),
) {
    let is_message = code.label();
    code.jump_if(JUMP_IF_WORD_IS_NOT, PROTOCOL, libc::IPPROTO_ICMPV6, transport);
    load(code, AFTER_IPV6, PORTS, 1, otherwise);
    code.push(LOAD_BYTE, SCRATCH, STACK, PORTS, 0);
    for message in NEIGHBOUR_DISCOVERY {
        code.jump_if(JUMP_IF_WORD_IS, SCRATCH, message, is_message);
    }
    code.jump(transport);
    code.place(is_message);
    code.push(STORE_WORD, STACK, 0, KEY_PORTS, 1);
    if is_outbound {
        for (mask, network) in [([0xff, 0xc0], [0xfe, 0x80]), ([0xff, 0xff], [0xff, 0x02])] {
            code.push(LOAD_WORD, SCRATCH, STACK, KEY, 0);
            code.push(AND, SCRATCH, 0, 0, word([mask[0], mask[1], 0, 0]));
            code.jump_if(JUMP_IF_WORD_IS, SCRATCH, word([network[0], network[1], 0, 0]), pass);
        }
    }
}

fn pass_if_allowed(code: &mut Assembly, rule: &Rule, pass: Label) {
    let next = code.label();
    let (family, first, address) = match rule.network {
        IpAddr::V4(of) => (AFTER_IPV4, 12, of.octets().to_vec()),
        IpAddr::V6(of) => (AFTER_IPV6, 0, of.octets().to_vec()),
    };
    code.jump_if(JUMP_IF_WORD_IS_NOT, TRANSPORT, family, next);
    for (at, part) in address.chunks(4).enumerate() {
        let bits = rule.prefix.saturating_sub(32 * at as u8).min(32);
        if bits == 0 {
            break;
        }
        code.push(LOAD_WORD, SCRATCH, STACK, KEY + first + 4 * at as i16, 0);
        if bits < 32 {
            code.push(AND, SCRATCH, 0, 0, word((mask_of(32, bits) as u32).to_be_bytes()));
        }
        code.jump_if(JUMP_IF_WORD_IS_NOT, SCRATCH, word([part[0], part[1], part[2], part[3]]), next);
    }
    if let Some(Transport { protocol, ports }) = rule.transport {
        code.jump_if(JUMP_IF_WORD_IS_NOT, PROTOCOL, protocol as i32, next);
        if let Some((first, last)) = ports {
            // Without the first fragment, which has the ports, the others are of no use.
            code.jump_if(JUMP_IF_WORD_IS, PORT, NO_PORTS, pass);
            code.jump_if(JUMP_IF_WORD_IS_BELOW, PORT, first.into(), next);
            code.jump_if(JUMP_IF_WORD_IS_ABOVE, PORT, last.into(), next);
        }
    }
    code.jump(pass);
    code.place(next);
}

/// Sets the arguments of a call that looks a key up.
fn map_and_key(code: &mut Assembly, map: &RecentMap) {
    code.push(LOAD_64, ARGUMENT[0], OF_MAP, 0, map.as_raw_fd());
    code.push(0, 0, 0, 0, 0);
    code.push(COPY, ARGUMENT[1], STACK, 0, 0);
    code.push(ADD, ARGUMENT[1], 0, 0, KEY.into());
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{Read, Write},
        net::{Ipv4Addr, Ipv6Addr},
    };

    use sandboxer_netlink::Netlink;

    use super::super::super::{link, namespace, tap};
    use super::*;

    /// The header for offloads before each frame of a tap.
    const OFFLOADS: [u8; 10] = [0; 10];
    /// Documentation's networks: the pod, a peer that a rule allows, and one that no rule does.
    const POD: &str = "192.0.2.2";
    const ALLOWED: &str = "198.51.100.7";
    const OTHER: &str = "203.0.113.9";

    /// The ends of a pod's network: what the world sends and sees, and what the guest does.
    struct Ends {
        world: File,
        guest: File,
    }

    impl Ends {
        /// Returns whether the guest's frame reaches the world.
        fn leaves(&mut self, sent: &[u8]) -> bool {
            arrives(&mut self.guest, &mut self.world, sent)
        }

        /// Returns whether the world's frame reaches the guest.
        fn enters(&mut self, sent: &[u8]) -> bool {
            arrives(&mut self.world, &mut self.guest, sent)
        }
    }

    /// Returns whether a frame arrives before one that always does.
    fn arrives(from: &mut File, to: &mut File, sent: &[u8]) -> bool {
        let marker = frame(0x0806, &[7; 28]);
        for frame in [sent, &marker] {
            from.write_all(&[&OFFLOADS, frame].concat()).unwrap();
        }
        let mut has_arrived = false;
        loop {
            let mut buffer = [0; 256];
            let count = to.read(&mut buffer).unwrap();
            let seen = &buffer[OFFLOADS.len()..count];
            if seen == marker {
                return has_arrived;
            }
            has_arrived |= seen == sent;
        }
    }

    fn with_rules(rules: &str, test: impl FnOnce(&mut Ends) + Send) {
        let rules: Egress = rules.parse().unwrap();
        namespace::within(namespace::fresh().unwrap(), || {
            let [world, guest] = [c"one", c"two"].map(|name| File::from(tap::open(name).unwrap()));
            let mut netlink = Netlink::open()?;
            let one = link::bring_up(&mut netlink, "one", 1500)?;
            let two = link::bring_up(&mut netlink, "two", 1500)?;
            // Twice: as after a VM that failed.
            for _ in 0..2 {
                link::join_filtered(&mut netlink, one, two, &rules.programs()?)?;
            }
            test(&mut Ends { world, guest });
            Ok::<_, io::Error>(())
        })
        .unwrap();
    }

    fn frame(protocol: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]].concat();
        frame.extend(protocol.to_be_bytes());
        frame.extend(payload);
        frame
    }

    /// A packet of a protocol by number, with the first bytes of its payload; `fragment`: the offset.
    fn ipv4(from: &str, to: &str, protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 20 + payload.len() as u8, 0, 0];
        packet.extend(fragment.to_be_bytes());
        packet.extend([64, protocol, 0, 0]);
        for address in [from, to] {
            packet.extend(address.parse::<Ipv4Addr>().unwrap().octets());
        }
        packet.extend(payload);
        frame(0x0800, &packet)
    }

    fn ipv6(from: &str, to: &str, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, payload.len() as u8, protocol, 255];
        for address in [from, to] {
            packet.extend(address.parse::<Ipv6Addr>().unwrap().octets());
        }
        packet.extend(payload);
        frame(0x86dd, &packet)
    }

    fn ports(from: u16, to: u16) -> [u8; 8] {
        let mut header = [0; 8];
        header[..2].copy_from_slice(&from.to_be_bytes());
        header[2..4].copy_from_slice(&to.to_be_bytes());
        header
    }

    const TCP: u8 = 6;
    const UDP: u8 = 17;
    const ICMP: u8 = 1;
    const ICMPV6: u8 = 58;

    #[test]
    fn a_pod_begins_only_what_its_rules_allow() {
        with_rules("198.51.100.0/24 tcp 8000-8080, 198.51.100.7 udp 53, 192.0.2.128/25", |ends| {
            let mut passes =
                |to, protocol, port| ends.leaves(&ipv4(POD, to, protocol, 0, &ports(40000, port)));
            for (port, expected) in [(7999, false), (8000, true), (8080, true), (8081, false)] {
                assert_eq!(passes(ALLOWED, TCP, port), expected, "{port}");
            }
            assert!(
                passes(ALLOWED, UDP, 53) && !passes(ALLOWED, UDP, 8000) && !passes("198.51.100.8", UDP, 53)
            );
            assert!(!passes(OTHER, TCP, 8000) && !passes(OTHER, UDP, 53) && !passes(OTHER, ICMP, 0));
            assert!(!passes(ALLOWED, ICMP, 0), "the rules name protocols");
            // A network without a protocol: all of it, and nothing beside it.
            assert!(
                passes("192.0.2.255", ICMP, 0)
                    && passes("192.0.2.128", TCP, 1)
                    && passes("192.0.2.200", 132, 9)
            );
            assert!(!passes("192.0.2.127", TCP, 1));
        });
    }

    #[test]
    fn a_pod_answers_whoever_has_sent_to_it_and_only_there() {
        for (from, to, protocol) in
            [(OTHER, POD, TCP), (OTHER, POD, UDP), ("2001:db8::9", "2001:db8:1::2", UDP)]
        {
            let packet = |from: &str, to: &str, ports: [u8; 8]| match from.contains(':') {
                true => ipv6(from, to, protocol, &ports),
                false => ipv4(from, to, protocol, 0, &ports),
            };
            with_rules("none", |ends| {
                let answer = packet(to, from, ports(80, 50000));
                assert!(!ends.leaves(&answer), "nobody has asked");
                assert!(ends.enters(&packet(from, to, ports(50000, 80))));
                assert!(ends.leaves(&answer));
                for other in [ports(81, 50000), ports(80, 50001)] {
                    assert!(!ends.leaves(&packet(to, from, other)), "{other:?}");
                }
                let of_another_protocol = ipv4(POD, OTHER, TCP + UDP - protocol, 0, &ports(80, 50000));
                assert!(!ends.leaves(&of_another_protocol));
            });
        }
        with_rules("none", |ends| {
            assert!(!ends.leaves(&ipv4(POD, OTHER, ICMP, 0, &[0; 8])));
            assert!(ends.enters(&ipv4(OTHER, POD, ICMP, 0, &[8, 0, 0, 0, 0, 0, 0, 0])));
            assert!(ends.leaves(&ipv4(POD, OTHER, ICMP, 0, &[0; 8])));
        });
    }

    #[test]
    fn what_could_hide_where_it_goes_is_dropped() {
        with_rules("198.51.100.0/24 tcp 80, 2001:db8::/32 tcp 80", |ends| {
            // Fragments after the first have no ports; they are of no use without the first.
            assert!(ends.leaves(&ipv4(POD, ALLOWED, TCP, 1, &ports(0, 0))));
            assert!(!ends.leaves(&ipv4(POD, OTHER, TCP, 1, &ports(40000, 80))));
            assert!(!ends.leaves(&ipv4(POD, ALLOWED, UDP, 1, &ports(40000, 80))));
            // A list of hops in the header.
            let mut with_options = ipv4(POD, ALLOWED, TCP, 0, &[0; 24]);
            with_options[14] = 0x4f;
            assert!(!ends.leaves(&with_options));
            // Too short for its ports, or its header.
            assert!(!ends.leaves(&ipv4(POD, ALLOWED, TCP, 0, &[156, 64])));
            assert!(!ends.leaves(&ipv4(POD, ALLOWED, TCP, 0, &[])[..30]));
            // Neither IP nor the search for neighbours; and within a VLAN.
            assert!(!ends.leaves(&frame(0x88cc, &[0; 40])));
            let allowed = ipv4(POD, ALLOWED, TCP, 0, &ports(40000, 80));
            assert!(ends.leaves(&allowed));
            let tagged = [&allowed[..12], &[0x81, 0, 0, 5], &allowed[12..]].concat();
            assert!(!ends.leaves(&tagged));
            // An IPv4 rule is none for the same bits in IPv6.
            assert!(!ends.leaves(&ipv6("2001:db8::2", "::ffff:198.51.100.7", TCP, &ports(40000, 80))));
            assert!(ends.leaves(&ipv6("2001:db8::2", "2001:db8:5::1", TCP, &ports(40000, 80))));
            assert!(!ends.leaves(&ipv6("2001:db8::2", "2001:db9::1", TCP, &ports(40000, 80))));
            assert!(
                !ends.leaves(&ipv6("2001:db8::2", "2001:db8:5::1", 43, &ports(40000, 80))),
                "a list of hops"
            );
            // Whoever looks for neighbours looks on the link.
            assert!(ends.leaves(&ipv6("fe80::2", "ff02::1:ff00:1", ICMPV6, &[135, 0, 0, 0])));
            assert!(ends.leaves(&ipv6("fe80::2", "fe80::1", ICMPV6, &[136, 0, 0, 0])));
            assert!(!ends.leaves(&ipv6("fe80::2", "2001:db9::1", ICMPV6, &[135, 0, 0, 0])));
            assert!(!ends.leaves(&ipv6("fe80::2", "ff02::1", ICMPV6, &[128, 0, 0, 0])), "an echo");
            // Whoever looks for the pod gets an answer, and no more.
            let [looks, answer, echo] = [135, 136, 128].map(|message| [message, 0, 0, 0]);
            let to_neighbour = |message: &[u8]| ipv6("2001:db9::2", "2001:db9::1", ICMPV6, message);
            assert!(!ends.leaves(&to_neighbour(&answer)));
            assert!(ends.enters(&ipv6("2001:db9::1", "ff02::1:ff00:2", ICMPV6, &looks)));
            assert!(ends.leaves(&to_neighbour(&answer)) && !ends.leaves(&to_neighbour(&echo)));
        });
    }

    #[test]
    fn the_longest_list_of_rules_fits() {
        let rules: Vec<String> =
            (0..64).map(|n| format!("2001:db8:{n:x}::/63 tcp {}-{}", n + 1, n + 9)).collect();
        with_rules(&rules.join(","), |ends| {
            assert!(ends.leaves(&ipv6("2001:db8::2", "2001:db8:3f:1::1", TCP, &ports(40000, 64))));
            assert!(!ends.leaves(&ipv6("2001:db8::2", "2001:db8:3f:2::1", TCP, &ports(40000, 64))));
        });
        assert!((rules.join(",") + ",::").parse::<Egress>().unwrap_err().contains("65 rules, at most 64"));
    }
}
