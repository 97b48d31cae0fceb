//! Limits of a pod's disks and network interfaces: from its annotations, else from the configuration.

use std::{collections::HashMap, ops::RangeInclusive};

use sandboxer_config::{DISK_BPS, DISK_IOPS, LimitsConfig, NET_BPS};
use sandboxer_host::network::NetLimits;
use sandboxer_vmm::{DiskLimits, Rate};

use crate::pod::quantity;

/// Maximum duration of a burst, seconds: it holds at most the tokens of this time.
const LONGEST_BURST: u64 = 60;

/// Maximum burst of a network interface, bytes: the kernel counts it in 32 bits.
const MOST_NET_BURST: u64 = u32::MAX as u64;

/// The annotations of one limit.
struct Names {
    rate: &'static str,
    burst: &'static str,
    /// The unit of the rate.
    unit: &'static str,
}

/// Bounds of one limit.
struct Bounds {
    rates: RangeInclusive<u64>,
    most_burst: u64,
    /// The configured limit, which applies if there is no annotation.
    most: Option<u64>,
}

impl Bounds {
    fn of_disk(rates: RangeInclusive<u64>, most: Option<u64>) -> Self {
        Self { rates, most_burst: u64::MAX, most }
    }

    fn of_interface(most: Option<u64>) -> Self {
        Self { rates: NET_BPS, most_burst: MOST_NET_BURST, most }
    }

    /// Returns the rates that a pod may have.
    fn allowed(&self) -> RangeInclusive<u64> {
        *self.rates.start()..=self.most.unwrap_or(*self.rates.end())
    }

    /// Returns the bursts that a pod with this rate may have.
    fn bursts(&self, per_second: u64) -> RangeInclusive<u64> {
        let most = per_second.saturating_mul(LONGEST_BURST).min(self.most_burst);
        per_second.min(most)..=most
    }
}

const UNIT_BYTES: &str = "bytes, or with Ki, Mi or Gi";
const BYTES: Names =
    Names { rate: "io.sandboxer.disk-bps", burst: "io.sandboxer.disk-bps-burst", unit: UNIT_BYTES };
const OPERATIONS: Names =
    Names { rate: "io.sandboxer.disk-iops", burst: "io.sandboxer.disk-iops-burst", unit: "operations" };
const RECEIVED: Names =
    Names { rate: "io.sandboxer.net-bps-rx", burst: "io.sandboxer.net-bps-rx-burst", unit: UNIT_BYTES };
const SENT: Names =
    Names { rate: "io.sandboxer.net-bps-tx", burst: "io.sandboxer.net-bps-tx-burst", unit: UNIT_BYTES };
/// Kubernetes' annotations for the same limit, in bits per second.
const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
const EGRESS: &str = "kubernetes.io/egress-bandwidth";

/// The annotation with the networks to which a pod may send packets.
const MAY_SEND_TO: &str = "io.sandboxer.egress";

/// Returns the limits of each disk of a pod with these annotations. The error names the annotation.
pub fn disk(annotations: &HashMap<String, String>, config: &LimitsConfig) -> Result<DiskLimits, String> {
    Ok(DiskLimits {
        bytes: rate(annotations, &BYTES, None, &Bounds::of_disk(DISK_BPS, config.disk_bps))?,
        operations: rate(annotations, &OPERATIONS, None, &Bounds::of_disk(DISK_IOPS, config.disk_iops))?,
    })
}

/// Returns the limits of each network interface of a pod with these annotations. `own_network`: whether the pod has a
/// network of its own. The error names the annotation.
pub fn network(
    annotations: &HashMap<String, String>,
    config: &LimitsConfig,
    own_network: bool,
) -> Result<NetLimits, String> {
    if !own_network {
        let names = [RECEIVED.rate, RECEIVED.burst, SENT.rate, SENT.burst, MAY_SEND_TO];
        return match names.into_iter().find(|name| annotations.contains_key(*name)) {
            Some(name) => Err(format!(
                "annotation {name} is for pods with a network of their own: this one is in the host's network (hostNetwork)"
            )),
            // Kubernetes ignores its own annotations for pods in the host's network.
            None => Ok(NetLimits::default()),
        };
    }
    let direction = |names: &Names, kubernetes: &str, most: Option<u64>| {
        let bounds = Bounds::of_interface(most);
        let bandwidth = match annotations.get(kubernetes).filter(|_| !annotations.contains_key(names.rate)) {
            Some(text) => Some(bandwidth(kubernetes, text, &bounds)?),
            None => None,
        };
        rate(annotations, names, bandwidth, &bounds)
    };
    let egress = annotations
        .get(MAY_SEND_TO)
        .map(|text| text.parse().map_err(|error| format!("annotation {MAY_SEND_TO} is {text:?}: {error}")));
    Ok(NetLimits {
        egress: egress.transpose()?,
        received: direction(&RECEIVED, INGRESS, config.net_bps_rx)?,
        sent: direction(&SENT, EGRESS, config.net_bps_tx)?,
    })
}

/// Returns the rate in Kubernetes' annotation `name`, bytes per second.
fn bandwidth(name: &str, text: &str, bounds: &Bounds) -> Result<u64, String> {
    let allowed = bounds.allowed();
    match quantity::kubernetes(text).map(|bits| bits / 8).filter(|bytes| allowed.contains(bytes)) {
        Some(bytes) => Ok(bytes),
        None => Err(format!(
            "annotation {name} is {text:?}: it takes {} to {} (bits per second, or with k, M, G, Ki, Mi, Gi)",
            allowed.start().saturating_mul(8),
            allowed.end().saturating_mul(8)
        )),
    }
}

/// Returns a limit within its bounds. `other`: the rate that another annotation requests.
fn rate(
    annotations: &HashMap<String, String>,
    Names { rate, burst, unit }: &Names,
    other: Option<u64>,
    bounds: &Bounds,
) -> Result<Option<Rate>, String> {
    let asked = |name: &str, range: RangeInclusive<u64>| {
        let Some(text) = annotations.get(name) else { return Ok(None) };
        let (least, most) = range.clone().into_inner();
        match quantity::bytes(text).filter(|value| range.contains(value)) {
            Some(value) => Ok(Some(value)),
            None => Err(format!("annotation {name} is {text:?}: it takes {least} to {most} ({unit})")),
        }
    };
    let per_second = asked(rate, bounds.allowed())?.or(other).or(bounds.most);
    let Some(per_second) = per_second else {
        return match annotations.get(*burst) {
            Some(text) => Err(format!("annotation {burst} is {text:?}, but there is no {rate}: set it, too")),
            None => Ok(None),
        };
    };
    let bursts = bounds.bursts(per_second);
    let burst = asked(burst, bursts.clone())?;
    Ok(Some(Rate { per_second, burst: burst.unwrap_or(*bursts.start()) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(annotations: &[(&str, &str)], config: &LimitsConfig) -> Result<DiskLimits, String> {
        let annotations = annotations.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        disk(&annotations.collect(), config)
    }

    #[test]
    fn a_pod_has_what_it_asks_for_else_what_is_configured() {
        let open = LimitsConfig::default();
        assert_eq!(limits(&[], &open), Ok(DiskLimits::default()));
        let asked = [(BYTES.rate, "4Mi"), (BYTES.burst, "16Mi"), (OPERATIONS.rate, "200")];
        let expected = DiskLimits {
            bytes: Some(Rate { per_second: 4 << 20, burst: 16 << 20 }),
            operations: Some(Rate::plain(200)),
        };
        assert_eq!(limits(&asked, &open), Ok(expected));
        let bounded = LimitsConfig { disk_bps: Some(8 << 20), ..open };
        assert_eq!(limits(&asked, &bounded), Ok(expected), "less than the bound");
        assert_eq!(limits(&[], &bounded), Ok(DiskLimits::configured(&bounded)));
        let burst = limits(&[(BYTES.burst, "16Mi")], &bounded).unwrap();
        assert_eq!(burst.bytes, Some(Rate { per_second: 8 << 20, burst: 16 << 20 }));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let bounded = LimitsConfig { disk_bps: Some(8 << 20), ..LimitsConfig::default() };
        for (asked, named, takes) in [
            (&[(BYTES.rate, "0")][..], BYTES.rate, "65536 to 8388608"),
            (&[(BYTES.rate, "9Mi")], BYTES.rate, "65536 to 8388608"),
            (&[(BYTES.rate, "fast")], BYTES.rate, "\"fast\""),
            (&[(BYTES.rate, "1Mi"), (BYTES.burst, "1023Ki")], BYTES.burst, "1048576 to 62914560"),
            (&[(BYTES.rate, "1Mi"), (BYTES.burst, "61Mi")], BYTES.burst, "1048576 to 62914560"),
            (&[(OPERATIONS.rate, "0")], OPERATIONS.rate, "10 to 10000000 (operations)"),
            (&[(OPERATIONS.burst, "100")], OPERATIONS.burst, "there is no io.sandboxer.disk-iops"),
        ] {
            let refused = limits(asked, &bounded).unwrap_err();
            assert!(
                refused.contains(&format!("annotation {named} ")) && refused.contains(takes),
                "{refused}"
            );
        }
    }

    fn net(annotations: &[(&str, &str)], config: &LimitsConfig) -> Result<NetLimits, String> {
        let annotations = annotations.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        network(&annotations.collect(), config, true)
    }

    #[test]
    fn an_interface_has_what_is_asked_for_else_what_is_configured() {
        let open = LimitsConfig::default();
        assert_eq!(net(&[], &open), Ok(NetLimits::default()));
        let both = net(&[(RECEIVED.rate, "1Mi"), (RECEIVED.burst, "4Mi"), (SENT.rate, "2Mi")], &open);
        let expected = NetLimits {
            received: Some(Rate { per_second: 1 << 20, burst: 4 << 20 }),
            sent: Some(Rate::plain(2 << 20)),
            egress: None,
        };
        assert_eq!(both, Ok(expected));
        let kubernetes = net(&[(INGRESS, "8M"), (EGRESS, "80Mi"), (SENT.burst, "20Mi")], &open);
        let expected = NetLimits {
            received: Some(Rate::plain(1_000_000)),
            sent: Some(Rate { per_second: 10 << 20, burst: 20 << 20 }),
            egress: None,
        };
        assert_eq!(kubernetes, Ok(expected));
        let ours = net(&[(INGRESS, "8M"), (RECEIVED.rate, "64Ki")], &open).unwrap();
        assert_eq!(ours.received, Some(Rate::plain(64 << 10)), "the daemon's own annotation holds");
        let bounded = LimitsConfig { net_bps_rx: Some(1 << 20), ..open };
        assert_eq!(net(&[], &bounded).unwrap().received, Some(Rate::plain(1 << 20)));
        let fast = net(&[(SENT.rate, "16Gi")], &open).unwrap().sent.unwrap();
        assert_eq!(fast.burst, MOST_NET_BURST);
    }

    #[test]
    fn a_limit_of_the_network_that_makes_no_sense_is_refused_by_name() {
        let bounded = LimitsConfig { net_bps_rx: Some(1 << 20), ..LimitsConfig::default() };
        for (asked, named, takes) in [
            (&[(RECEIVED.rate, "0")][..], RECEIVED.rate, "16384 to 1048576"),
            (&[(RECEIVED.rate, "2Mi")], RECEIVED.rate, "16384 to 1048576"),
            (&[(RECEIVED.burst, "1Ki")], RECEIVED.burst, "1048576 to 62914560"),
            (&[(SENT.burst, "1Mi")], SENT.burst, "there is no io.sandboxer.net-bps-tx"),
            (&[(SENT.rate, "16Gi"), (SENT.burst, "16Gi")], SENT.burst, "4294967295 to 4294967295"),
            (&[(INGRESS, "100M")], INGRESS, "131072 to 8388608 (bits"),
            (&[(EGRESS, "1k")], EGRESS, "131072 to"),
            (&[(EGRESS, "fast")], EGRESS, "\"fast\""),
        ] {
            let refused = net(asked, &bounded).unwrap_err();
            assert!(
                refused.contains(&format!("annotation {named} ")) && refused.contains(takes),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_pod_in_the_hosts_network_has_no_limit_of_it() {
        let bounded = LimitsConfig { net_bps_rx: Some(1 << 20), ..LimitsConfig::default() };
        let with = |name: &str| network(&[(name.to_owned(), "1Mi".to_owned())].into(), &bounded, false);
        assert_eq!(with(INGRESS), Ok(NetLimits::default()));
        assert!(with(SENT.burst).unwrap_err().contains(SENT.burst));
    }
}
