//! Restricts where a pod may send packets to.
//!
//! Two BPF programs ([`program`]) decide, in the pod's network namespace, where neither the guest nor its VMM is. One sees what comes from the
//! guest, before it is redirected to the pod's interface: it drops what no rule allows, unless it answers somebody. The other sees
//! what comes to the pod, and remembers who that was. So a pod can answer whoever has sent to it, and can begin nothing with others.
//!
//! ```text
//!   eth0 ──▶ inbound: remembers ──redirect──▶ device ──▶ guest
//!   eth0 ◀──redirect── outbound: rules, else remembered, else dropped ◀── device ◀── guest
//! ```

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

pub(super) mod program;

/// Maximum number of rules of a pod.
const MAX_RULES: usize = 64;

/// The word for no rule at all.
const NONE: &str = "none";

/// Where a pod may send packets to: to the networks of its rules. The others only get answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Egress(Vec<Rule>);

/// A network, with its protocol and ports if only these are allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    network: IpAddr,
    prefix: u8,
    transport: Option<Transport>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Transport {
    protocol: Protocol,
    /// The first and the last port.
    ports: Option<(u16, u16)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Tcp = libc::IPPROTO_TCP as isize,
    Udp = libc::IPPROTO_UDP as isize,
}

impl FromStr for Egress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim() == NONE {
            return Ok(Self::default());
        }
        let rules: Vec<Rule> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
        match rules.len() {
            0..=MAX_RULES => Ok(Self(rules)),
            count => Err(format!("it has {count} rules, at most {MAX_RULES} are allowed")),
        }
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let usage = || {
            format!(
                "a rule is {text:?}: it takes a network, and perhaps tcp or udp, and perhaps a port or two with a hyphen, such as \
                 \"10.0.0.0/8\" or \"192.0.2.7 tcp 8000-8080\"; {NONE:?} allows nothing"
            )
        };
        let mut words = text.split_whitespace();
        let network = words.next().ok_or_else(usage)?;
        let (address, prefix) =
            network.split_once('/').map_or((network, None), |(of, prefix)| (of, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| usage())?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(longest), str::parse).map_err(|_| usage())?;
        if prefix > longest {
            return Err(usage());
        }
        let masked = match address {
            IpAddr::V4(of) => IpAddr::V4(Ipv4Addr::from_bits(of.to_bits() & mask_of(32, prefix) as u32)),
            IpAddr::V6(of) => IpAddr::V6(Ipv6Addr::from_bits(of.to_bits() & mask_of(128, prefix))),
        };
        if masked != address {
            return Err(format!("{network} has bits behind its prefix: write {masked}/{prefix}"));
        }
        let protocol = match words.next() {
            None => None,
            Some("tcp") => Some(Protocol::Tcp),
            Some("udp") => Some(Protocol::Udp),
            Some(_) => return Err(usage()),
        };
        let ports = words.next().map(|ports| {
            let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
            let (first, last) = (first.parse().ok()?, last.parse().ok()?);
            (0 < first && first <= last).then_some((first, last))
        });
        let ports = ports.map(|ports: Option<(u16, u16)>| ports.ok_or_else(usage)).transpose()?;
        if words.next().is_some() {
            return Err(usage());
        }
        let transport = protocol.map(|protocol| Transport { protocol, ports });
        Ok(Self { network: address, prefix, transport })
    }
}

impl fmt::Display for Egress {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return to.write_str(NONE);
        }
        self.0.iter().enumerate().try_for_each(|(at, rule)| {
            let Rule { network, prefix, transport } = rule;
            write!(to, "{}{network}/{prefix}", if at == 0 { "" } else { ", " })?;
            let Some(Transport { protocol, ports }) = transport else { return Ok(()) };
            to.write_str(match protocol {
                Protocol::Tcp => " tcp",
                Protocol::Udp => " udp",
            })?;
            match ports {
                Some((first, last)) if first == last => write!(to, " {first}"),
                Some((first, last)) => write!(to, " {first}-{last}"),
                None => Ok(()),
            }
        })
    }
}

impl From<Egress> for String {
    fn from(egress: Egress) -> Self {
        egress.to_string()
    }
}

impl TryFrom<String> for Egress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Returns the mask of a prefix in an address of so many bits.
fn mask_of(bits: u8, prefix: u8) -> u128 {
    let ones = u128::MAX.checked_shr(128 - u32::from(bits)).unwrap_or(0);
    ones & !ones.checked_shr(u32::from(prefix)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_as_they_are_written() {
        for (text, canonical) in [
            ("none", "none"),
            (" 10.0.0.0/8 ", "10.0.0.0/8"),
            (
                "192.0.2.7 tcp 8000-8080,2001:db8::/32 udp 53",
                "192.0.2.7/32 tcp 8000-8080, 2001:db8::/32 udp 53",
            ),
            ("0.0.0.0/0 tcp, ::/0", "0.0.0.0/0 tcp, ::/0"),
        ] {
            let rules: Egress = text.parse().unwrap();
            assert_eq!(rules.to_string(), canonical);
            let json = serde_json::to_string(&rules).unwrap();
            assert_eq!(serde_json::from_str::<Egress>(&json).unwrap(), rules);
        }
        for (text, reason) in [
            ("", "it takes a network"),
            ("10.0.0.0/8,", "a rule is \"\""),
            ("10.0.0.0/33", "it takes a network"),
            ("10.0.0.1/8", "write 10.0.0.0/8"),
            ("2001:db8::1/32", "write 2001:db8::/32"),
            ("example.org", "it takes a network"),
            ("10.0.0.0/8 sctp", "tcp or udp"),
            ("10.0.0.0/8 tcp 0", "a port or two"),
            ("10.0.0.0/8 tcp 9-8", "a port or two"),
            ("10.0.0.0/8 80", "tcp or udp"),
            ("10.0.0.0/8 tcp 80 udp", "it takes a network"),
        ] {
            let refused = text.parse::<Egress>().unwrap_err();
            assert!(refused.contains(reason), "{text:?}: {refused}");
        }
    }
}
