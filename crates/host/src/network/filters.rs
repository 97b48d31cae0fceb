//! Detects netfilter rules in a pod's network namespace, for example of a service mesh's CNI plugin. The guest's
//! packets bypass the namespace's own network stack, and so all these rules.

use std::{
    fs, io,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket},
};

/// The subsystem of nftables and the request for its rules, from Linux' `nfnetlink.h` and `nf_tables.h`.
const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_GETRULE: u16 = 7;
/// Length of the headers of netlink and nfnetlink, bytes.
const HEADS: u8 = 20;
/// Attributes of a rule: the names of its table and chain.
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
/// Bits of an attribute's type that are no part of it.
const NLA_FLAGS: u16 = 0xc000;

/// docker's chains for the name server that it has on the loopback of a container's namespace: the guest reaches that server through the
/// daemon, without these rules. In the table `nat`, each is entered by one jump.
const OF_DOCKER: [&str; 2] = ["DOCKER_OUTPUT", "DOCKER_POSTROUTING"];

/// `IPT_SO_GET_INFO` and `IP6T_SO_GET_INFO` (`ip_tables.h`, `ip6_tables.h`).
const GET_INFO: libc::c_int = 64;
/// Longest name of a table, bytes, with the terminating zero.
const TABLE_NAME: usize = 32;

/// Whether the kernel has no nftables: each further request would make it look for the module.
static NO_NFTABLES: AtomicBool = AtomicBool::new(false);
const NFTABLES: &str = "/sys/module/nf_tables";

/// Returns a description of the rules in the calling thread's network namespace; `None` if there are none.
pub fn found() -> io::Result<Option<String>> {
    for (family, tables, level) in [
        (AddressFamily::Inet, "/proc/thread-self/net/ip_tables_names", libc::SOL_IP),
        (AddressFamily::Inet6, "/proc/thread-self/net/ip6_tables_names", libc::SOL_IPV6),
    ] {
        if let Some(table) = legacy(family, tables, level)? {
            let program = if family == AddressFamily::Inet { "iptables" } else { "ip6tables" };
            return Ok(Some(format!("rules of {program}, table {table}")));
        }
    }
    if NO_NFTABLES.load(Ordering::Relaxed) && !Path::new(NFTABLES).exists() {
        return Ok(None);
    }
    match has_nftables_rule() {
        Ok(there) => Ok(there.then(|| "rules of nftables".to_owned())),
        // The kernel has no nftables.
        Err(Errno::EINVAL | Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP) => {
            NO_NFTABLES.store(true, Ordering::Relaxed);
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// A table's description from `getsockopt`.
#[repr(C)]
struct Info {
    name: [u8; TABLE_NAME],
    valid_hooks: u32,
    hook_entry: [u32; 5],
    underflow: [u32; 5],
    num_entries: u32,
    size: u32,
}

/// Returns the first table of the legacy interface that has a rule or a user-defined chain.
fn legacy(family: AddressFamily, names: &str, level: libc::c_int) -> io::Result<Option<String>> {
    // Most kernels create a namespace's tables at their first use.
    let names = match fs::read_to_string(names) {
        Ok(names) if !names.trim().is_empty() => names,
        _ => return Ok(None),
    };
    // SAFETY: the call creates a new descriptor.
    let fd = unsafe {
        libc::socket(family as libc::c_int, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_RAW)
    };
    if fd == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created, and has no other owner.
    let fd = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    for table in names.lines() {
        // SAFETY: all zeroes is a valid value: numbers.
        let mut info: Info = unsafe { std::mem::zeroed() };
        let max_length = info.name.len() - 1;
        for (into, byte) in info.name.iter_mut().zip(table.bytes().take(max_length)) {
            *into = byte;
        }
        let mut length = size_of::<Info>() as libc::socklen_t;
        // SAFETY: the kernel reads the name and writes no more than `length` bytes of `info`, which outlives the call.
        let status = unsafe {
            libc::getsockopt(fd.as_raw_fd(), level, GET_INFO, (&raw mut info).cast(), &raw mut length)
        };
        if status == -1 {
            return Err(io::Error::last_os_error());
        }
        // An empty table has one entry for each hook's policy, and one for the end.
        if info.num_entries > info.valid_hooks.count_ones() + 1 {
            return Ok(Some(table.to_owned()));
        }
    }
    Ok(None)
}

/// Returns whether nftables has a rule, other than docker's for its name server.
fn has_nftables_rule() -> Result<bool, Errno> {
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    let mut ask = Vec::with_capacity(HEADS.into());
    ask.extend(u32::from(HEADS).to_ne_bytes());
    ask.extend((NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETRULE).to_ne_bytes());
    ask.extend(((libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16).to_ne_bytes());
    // Sequence number and sender; then any family, version 0, no resource.
    ask.resize(HEADS.into(), 0);
    send(netlink.as_raw_fd(), &ask, MsgFlags::empty())?;
    let mut answer = vec![0; 64 << 10];
    loop {
        let length = recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        let mut rest = answer.get(..length).unwrap_or_default();
        if rest.is_empty() {
            return Ok(false);
        }
        while let Some((message, next)) = message(rest) {
            rest = next;
            let code = || message.get(16..20)?.try_into().ok().map(i32::from_ne_bytes);
            match number(message, 4).map(libc::c_int::from) {
                Some(libc::NLMSG_DONE) | None => return Ok(false),
                Some(libc::NLMSG_ERROR) => match code() {
                    Some(0) | None => return Ok(false),
                    Some(code) => return Err(Errno::from_raw(code.saturating_neg())),
                },
                Some(_) if is_of_docker(message) => {}
                Some(_) => return Ok(true),
            }
        }
    }
}

/// Splits the first message from those behind it.
fn message(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let message = bytes.get(..length).filter(|message| message.len() >= 16)?;
    Some((message, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

fn number(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Returns whether a rule is in one of docker's chains, or jumps there.
fn is_of_docker(rule: &[u8]) -> bool {
    let name = |kind| attribute(rule, kind).and_then(|name| name.strip_suffix(&[0]));
    let jumps_to = |chain: &str| {
        rule.windows(chain.len() + 1).any(|part| part.strip_suffix(&[0]) == Some(chain.as_bytes()))
    };
    name(NFTA_RULE_TABLE) == Some(b"nat")
        && match name(NFTA_RULE_CHAIN) {
            Some(b"OUTPUT") => jumps_to(OF_DOCKER[0]),
            Some(b"POSTROUTING") => jumps_to(OF_DOCKER[1]),
            chain => OF_DOCKER.iter().any(|of_docker| chain == Some(of_docker.as_bytes())),
        }
}

/// Returns the value of a message's attribute.
fn attribute(message: &[u8], kind: u16) -> Option<&[u8]> {
    let mut rest = message.get(HEADS.into()..)?;
    loop {
        let length = usize::from(number(rest, 0)?);
        let value = rest.get(4..length)?;
        if number(rest, 2)? & !NLA_FLAGS == kind {
            return Some(value);
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::namespace;
    use super::*;

    /// Runs `program` in a new network namespace, then searches for rules. `None`: the host does not have the program,
    /// or its kernel lacks the feature.
    fn after(program: &str, arguments: &[&str]) -> Option<Option<String>> {
        namespace::within(namespace::fresh().unwrap(), || {
            assert_eq!(found()?, None, "in an empty one");
            let ran = Command::new(program).args(arguments).output();
            match ran.is_ok_and(|output| output.status.success()) {
                true => found().map(Some),
                false => Ok(None),
            }
        })
        .unwrap()
    }

    #[test]
    fn rules_in_a_namespace_are_found_and_named() {
        let rule = ["-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-j", "REDIRECT", "--to-ports", "15001"];
        for (program, named) in [
            ("iptables-legacy", "rules of iptables, table nat"),
            ("ip6tables-legacy", "rules of ip6tables, table nat"),
            ("iptables-nft", "rules of nftables"),
        ] {
            match after(program, &rule) {
                Some(found) => assert_eq!(found.as_deref(), Some(named), "{program}"),
                None => eprintln!("skipped: {program} does not work here"),
            }
        }
    }

    #[test]
    fn dockers_rules_for_its_name_server_are_nothing_and_others_beside_them_are_found() {
        let docker = "set -e; n='iptables-nft -t nat'; $n -N DOCKER_OUTPUT; $n -N DOCKER_POSTROUTING; \
                      $n -A OUTPUT -d 127.0.0.11 -j DOCKER_OUTPUT; $n -A POSTROUTING -d 127.0.0.11 -j DOCKER_POSTROUTING; \
                      $n -A DOCKER_OUTPUT -d 127.0.0.11 -p udp --dport 53 -j DNAT --to-destination 127.0.0.11:4000; \
                      $n -A DOCKER_POSTROUTING -s 127.0.0.11 -p udp --sport 4000 -j SNAT --to-source :53;";
        let Some(found) = after("sh", &["-c", docker]) else {
            return eprintln!("skipped: iptables-nft does not work here");
        };
        assert_eq!(found, None);
        for more in ["$n -A OUTPUT -p tcp -j REDIRECT", "iptables-nft -A OUTPUT -p tcp -j DROP"] {
            assert!(after("sh", &["-c", &format!("{docker} {more}")]).unwrap().is_some(), "{more}");
        }
    }

    #[test]
    fn tables_without_rules_are_nothing() {
        if let Some(found) = after("iptables-legacy", &["-t", "filter", "-L"]) {
            assert_eq!(found, None);
        }
    }
}
