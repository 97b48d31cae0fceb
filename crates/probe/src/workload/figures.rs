//! Plots of a result of workloads: bars of variants, curves of sweeps, percentiles of latency.

use super::definition::{Metric, Probe};
use super::report::Report;
use super::store::Loaded;
use super::summary::{Series, shown};
use crate::figures::{Figure, Palette};
use crate::plot::Ink;
use crate::plot::curves::{Curve, growth, percentiles};
use crate::plot::intervals::{Bar, Group, intervals};
use crate::store::file_name;
use crate::workload::published;

/// Minimum number of sizes in a curve; fewer are drawn as bars.
const SWEEP_OF: usize = 3;

/// Returns the plots of a probe that has figures.
pub fn figures(result: &Loaded, probe: &Probe, palette: &Palette) -> Vec<Figure> {
    let Some(main) = probe.metrics.first() else { return Vec::new() };
    let names: Vec<&str> = probe.cases(result.report.profile).map(|case| &*case.name).collect();
    let (sweeps, rest) = sweeps(&names);
    let mut figures = Vec::new();
    figures.extend(bars(result, probe, main, &rest, palette));
    figures.extend(sweeps.iter().filter_map(|sweep| curve(result, probe, main, sweep, palette)));
    figures.extend(latencies(result, probe, &names, palette));
    figures
}

/// Variants that differ in one number: their common name, and each number with its variant.
#[derive(Debug, Clone, PartialEq)]
struct Sweep<'a> {
    name: String,
    cases: Vec<(f64, &'a str)>,
}

/// Returns the sweeps among variants, and the variants that belong to none.
fn sweeps<'a>(names: &[&'a str]) -> (Vec<Sweep<'a>>, Vec<&'a str>) {
    let mut all: Vec<Sweep<'a>> = Vec::new();
    for &name in names {
        let Some((rest, size)) = numbered(name) else { continue };
        match all.iter_mut().find(|sweep| sweep.name == rest) {
            Some(sweep) => sweep.cases.push((size, name)),
            None => all.push(Sweep { name: rest, cases: vec![(size, name)] }),
        }
    }
    all.retain(|sweep| sweep.cases.len() >= SWEEP_OF);
    let swept = |name: &str| all.iter().any(|sweep| sweep.cases.iter().any(|(_, known)| *known == name));
    let rest = names.iter().copied().filter(|name| !swept(name)).collect();
    (all, rest)
}

/// Returns the number in a name with exactly one, and the rest of the name: "randread-4k" has 4096 and "randread".
fn numbered(name: &str) -> Option<(String, f64)> {
    let number = |part: &str| {
        let (digits, factor) = match part.as_bytes().last()? {
            b'k' | b'K' => (&part[..part.len() - 1], 1024.0),
            _ => (part, 1.0),
        };
        Some(digits.parse::<u32>().ok().map(f64::from)? * factor)
    };
    let parts: Vec<&str> = name.split('-').collect();
    let mut numbers = parts.iter().filter_map(|part| number(part));
    let only = numbers.next().filter(|_| numbers.next().is_none())?;
    let rest: Vec<&str> = parts.into_iter().filter(|part| number(part).is_none()).collect();
    Some((rest.join(" "), only))
}

fn series<'a>(
    result: &'a Loaded,
    probe: &Probe,
    case: &str,
    metric: &str,
) -> impl Iterator<Item = &'a Series> {
    let (probe, case, metric) = (probe.name.clone(), case.to_owned(), metric.to_owned());
    let all = result.report.series.iter();
    all.filter(move |series| series.probe == probe && series.case == case && series.metric.name == metric)
}

fn bars(
    result: &Loaded,
    probe: &Probe,
    metric: &Metric,
    cases: &[&str],
    palette: &Palette,
) -> Option<Figure> {
    let group = |case: &&str| {
        let measured = series(result, probe, case, &metric.name).filter_map(|series| {
            let name = label(result, &series.runtime);
            let (interval, ink) = (result.interval(series), palette.ink(&series.runtime));
            Some(Bar { name, value: series.p50?, interval, shown: shown(series.p50), ink })
        });
        let mut bars: Vec<Bar> = measured.collect();
        if !bars.is_empty() {
            bars.extend(published_bars(&result.report, probe, metric, case));
        }
        Group { name: (*case).to_owned(), bars }
    };
    let groups: Vec<Group> = cases.iter().map(group).filter(|group| !group.bars.is_empty()).collect();
    let elsewhere =
        groups.iter().flat_map(|group| &group.bars).any(|bar| matches!(bar.ink, Ink::Published(_)));
    let mut caption = format!("{}: medians, {} is better. ", probe.what, metric.better.as_str());
    caption += "A line shows the 95 % bootstrap interval, where there are four values or more.";
    if elsewhere {
        caption += " Bars named 'published' are means of a study, on other hardware.";
    }
    (!groups.is_empty()).then(|| Figure {
        name: file_name(&format!("workload-{}", probe.name)),
        caption,
        scene: intervals(&title(probe, metric), &metric.unit, &groups),
    })
}

/// Returns the published means of one variant with the same parameters.
fn published_bars(report: &Report, probe: &Probe, metric: &Metric, case: &str) -> Vec<Bar> {
    if !report.is_like_studies() {
        return Vec::new();
    }
    let like = published::like(&probe.name, &metric.name).into_iter();
    let of_case = like.filter(|(_, cases)| cases.iter().map(String::as_str).eq([case]));
    let bar = |(system, mean): (&str, f64)| Bar {
        name: format!("{system}, published"),
        value: mean,
        interval: None,
        shown: shown(Some(mean)),
        ink: Ink::Published(0),
    };
    of_case.flat_map(|(feature, _)| feature.means().map(bar).collect::<Vec<_>>()).collect()
}

fn curve(
    result: &Loaded,
    probe: &Probe,
    metric: &Metric,
    sweep: &Sweep<'_>,
    palette: &Palette,
) -> Option<Figure> {
    let curve = |runtime: &String| {
        let value = |case: &str| {
            series(result, probe, case, &metric.name)
                .find(|series| series.runtime == *runtime)
                .and_then(|series| series.p50)
        };
        let mut points: Vec<(f64, f64)> =
            sweep.cases.iter().filter_map(|(size, case)| Some((*size, value(case)?))).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Curve { name: label(result, runtime), points, ink: palette.ink(runtime), dots: true }
    };
    let curves: Vec<Curve> =
        result.runtimes().iter().map(curve).filter(|curve| !curve.points.is_empty()).collect();
    let title = format!("{} {}", title(probe, metric), sweep.name);
    (!curves.is_empty()).then(|| Figure {
        name: file_name(&format!("workload-{}-{}", probe.name, sweep.name)),
        caption: format!("{}: medians, {} is better.", probe.what, metric.better.as_str()),
        scene: growth(&title, (&sweep.name, &metric.unit), &curves),
    })
}

/// Returns one plot for each variant whose tool prints percentiles.
fn latencies(result: &Loaded, probe: &Probe, cases: &[&str], palette: &Palette) -> Vec<Figure> {
    let mut kinds: Vec<(String, Vec<(f64, &Metric)>)> = Vec::new();
    for metric in &probe.metrics {
        let Some((what, part)) = percentile(&metric.name) else { continue };
        match kinds.iter_mut().find(|(known, _)| *known == what) {
            Some((_, parts)) => parts.push((part, metric)),
            None => kinds.push((what, vec![(part, metric)])),
        }
    }
    let plot = |case: &&str, what: &str, parts: &[(f64, &Metric)]| {
        let curve = |runtime: &String| {
            let value = |metric: &Metric| {
                series(result, probe, case, &metric.name)
                    .find(|series| series.runtime == *runtime)
                    .and_then(|series| series.p50)
            };
            let points: Vec<(f64, f64)> =
                parts.iter().filter_map(|(part, metric)| Some((value(metric)?, *part))).collect();
            Curve { name: label(result, runtime), points, ink: palette.ink(runtime), dots: true }
        };
        let curves: Vec<Curve> =
            result.runtimes().iter().map(curve).filter(|curve| curve.points.len() > 1).collect();
        let name = [&probe.name, *case, what].map(str::trim).join(" ");
        let title = format!("{}, latency", name.split_whitespace().collect::<Vec<_>>().join(" "));
        (!curves.is_empty()).then(|| Figure {
            name: file_name(&format!("workload-{}-latency", name.trim().replace(' ', "-"))),
            caption: "Medians over the runs of the percentiles that the tool prints: one dot each.".into(),
            scene: percentiles(&title, &parts[0].1.unit, &curves),
        })
    };
    let kinds = kinds.iter().filter(|(_, parts)| parts.len() > 1);
    kinds
        .flat_map(|(what, parts)| cases.iter().filter_map(|case| plot(case, what, parts)).collect::<Vec<_>>())
        .collect()
}

/// Returns the metric of which this is a percentile, and the percentile: "set_p99_ms" is 0.99 of "set", "p99_9_us" is
/// 0.999 of "".
fn percentile(name: &str) -> Option<(String, f64)> {
    let (name, _unit) = name.rsplit_once('_')?;
    let (what, digits) = name.rsplit_once("_p").or_else(|| Some(("", name.strip_prefix('p')?)))?;
    let percent: f64 = digits.replace('_', ".").parse().ok()?;
    Some((what.to_owned(), percent / 100.0))
}

fn title(probe: &Probe, metric: &Metric) -> String {
    let unit = if metric.unit.is_empty() { String::new() } else { format!(", {}", metric.unit) };
    format!("{}: {}{unit}", probe.name, metric.name)
}

/// Returns the label of a runtime's figures, which states whether its guests were emulated.
fn label(result: &Loaded, runtime: &str) -> String {
    if result.report.manifest.is_emulated(runtime) {
        format!("{runtime} (emulated)")
    } else {
        runtime.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_that_differ_in_a_number_are_a_sweep() {
        let names = ["randread-512", "randread-4k", "randread-64k", "share-randread-4k-direct", "one"];
        let (sweeps, rest) = sweeps(&names);
        assert_eq!(sweeps.len(), 1);
        assert_eq!((&*sweeps[0].name, sweeps[0].cases[1]), ("randread", (4096.0, "randread-4k")));
        assert_eq!(rest, ["share-randread-4k-direct", "one"]);
    }

    #[test]
    fn percentiles_are_known_by_their_names() {
        assert_eq!(percentile("p50_us"), Some(("".into(), 0.5)));
        assert_eq!(percentile("set_p99_ms"), Some(("set".into(), 0.99)));
        assert!((percentile("p99_9_us").unwrap().1 - 0.999).abs() < 1e-9);
        assert_eq!(percentile("per_s"), None);
        assert_eq!(percentile("max_us"), None);
    }
}
