//! Limits of a pod's disks: from its annotations, else from the configuration.

use std::{collections::HashMap, ops::RangeInclusive};

use sandboxer_config::{DISK_BPS, DISK_IOPS, LimitsConfig};
use sandboxer_vmm::{DiskLimits, Rate};

use crate::pod::quantity;

/// Most seconds whose tokens a burst may hold.
const LONGEST_BURST: u64 = 60;

/// The annotations of one limit.
struct Names {
    rate: &'static str,
    burst: &'static str,
    /// What the rate counts.
    unit: &'static str,
}

const BYTES: Names = Names {
    rate: "io.sandboxer.disk-bps",
    burst: "io.sandboxer.disk-bps-burst",
    unit: "bytes, or with Ki, Mi or Gi",
};
const OPERATIONS: Names =
    Names { rate: "io.sandboxer.disk-iops", burst: "io.sandboxer.disk-iops-burst", unit: "operations" };

/// Returns the limits of each disk of a pod with these annotations. The error names the annotation.
pub fn disk(annotations: &HashMap<String, String>, config: &LimitsConfig) -> Result<DiskLimits, String> {
    Ok(DiskLimits {
        bytes: rate(annotations, &BYTES, DISK_BPS, config.disk_bps)?,
        operations: rate(annotations, &OPERATIONS, DISK_IOPS, config.disk_iops)?,
    })
}

/// Returns a limit within `range`. `most`: the configured one, which holds if there is no annotation.
fn rate(
    annotations: &HashMap<String, String>,
    Names { rate, burst, unit }: &Names,
    range: RangeInclusive<u64>,
    most: Option<u64>,
) -> Result<Option<Rate>, String> {
    let asked = |name: &str, range: RangeInclusive<u64>| {
        let Some(text) = annotations.get(name) else { return Ok(None) };
        let (least, most) = range.clone().into_inner();
        match quantity::bytes(text).filter(|value| range.contains(value)) {
            Some(value) => Ok(Some(value)),
            None => Err(format!("annotation {name} is {text:?}: it takes {least} to {most} ({unit})")),
        }
    };
    let per_second = asked(rate, *range.start()..=most.unwrap_or(*range.end()))?.or(most);
    let Some(per_second) = per_second else {
        return match annotations.get(*burst) {
            Some(text) => Err(format!("annotation {burst} is {text:?}, but there is no {rate}: set it, too")),
            None => Ok(None),
        };
    };
    let burst = asked(burst, per_second..=per_second.saturating_mul(LONGEST_BURST))?;
    Ok(Some(Rate { per_second, burst: burst.unwrap_or(per_second) }))
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
        let bounded = LimitsConfig { disk_bps: Some(8 << 20), disk_iops: None };
        assert_eq!(limits(&asked, &bounded), Ok(expected), "less than the bound");
        assert_eq!(limits(&[], &bounded), Ok(DiskLimits::configured(&bounded)));
        let burst = limits(&[(BYTES.burst, "16Mi")], &bounded).unwrap();
        assert_eq!(burst.bytes, Some(Rate { per_second: 8 << 20, burst: 16 << 20 }));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let bounded = LimitsConfig { disk_bps: Some(8 << 20), disk_iops: None };
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
}
