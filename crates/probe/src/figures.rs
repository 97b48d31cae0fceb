//! The plots of a result, for the page and for files.

use crate::anchors::{self, Anchor, Figure as Published};
use crate::clock::Clock;
use crate::plot::bars::{Bar, waterfall};
use crate::plot::curves::{Curve, distributions, growth};
use crate::plot::{Ink, Scene};
use crate::report::{Report, Series, times};
use crate::sample::Mode;
use crate::store::{Loaded, file_name};
use crate::summary::cdf;
use crate::workload::store::Loaded as Workload;

/// A plot with its file name and caption.
#[derive(Debug, Clone)]
pub struct Figure {
    /// File name without extension.
    pub name: String,
    /// Caption below the plot.
    pub caption: String,
    /// The plot itself.
    pub scene: Scene,
}

/// Colours of runtimes, the same in every plot of a page.
#[derive(Debug, Clone, Default)]
pub struct Palette {
    names: Vec<String>,
    /// Whether to draw published wall times beside virtual ones, labelled as such.
    beside_virtual: bool,
}

impl Palette {
    /// Assigns colours to runtimes in the order of their first appearance.
    pub fn new<'a>(results: impl IntoIterator<Item = &'a Loaded>, workloads: &[Workload]) -> Self {
        let mut names: Vec<String> = Vec::new();
        let mut add = |name: &String| {
            if !names.contains(name) {
                names.push(name.clone());
            }
        };
        for report in results.into_iter().map(|result| &result.report) {
            let startup = report.series.iter().map(|series| &series.runtime);
            startup.chain(report.memory.iter().map(|row| &row.runtime)).for_each(&mut add);
        }
        workloads.iter().flat_map(|result| &result.report.series).for_each(|series| add(&series.runtime));
        Self { names, beside_virtual: false }
    }

    /// Returns the palette with published times beside virtual ones, if `wanted`.
    pub fn with_published(self, wanted: bool) -> Self {
        Self { beside_virtual: wanted, ..self }
    }

    /// Returns the colour of `runtime`.
    pub fn ink(&self, runtime: &str) -> Ink {
        Ink::Series(self.names.iter().position(|name| name == runtime).unwrap_or_default())
    }
}

/// Returns all plots for which a result has data.
pub fn figures(result: &Loaded, palette: &Palette) -> Vec<Figure> {
    let mut figures = Vec::new();
    figures.extend(startup(result, Mode::Serial, palette));
    figures.extend(startup(result, Mode::Parallel, palette));
    figures.extend(batches(&result.report, palette));
    figures.extend(
        result.report.series.iter().filter_map(|series| stages(series, result.report.clock, palette)),
    );
    figures.extend(memory(&result.report, palette));
    figures
}

fn startup(result: &Loaded, mode: Mode, palette: &Palette) -> Option<Figure> {
    let (series, clock) = (&result.report.series, result.report.clock);
    // The axis names the unit; "virtual ms" would not fit into a legend.
    let of_times = if clock == Clock::Wall { " ms" } else { "" };
    let series = series.iter().filter(|series| series.mode == mode);
    let mut curves: Vec<Curve> = series
        .map(|series| {
            let times = times(&result.samples, &series.runtime, mode);
            let p50 = series
                .summary
                .p50_ms
                .map_or_else(|| "no times".into(), |ms| format!("p50 {ms:.0}{of_times}"));
            let name = format!("{}, n = {}, {p50}", series.runtime, series.summary.n);
            Curve { name, points: cdf(&times), ink: palette.ink(&series.runtime), dots: false }
        })
        .filter(|curve| !curve.points.is_empty())
        .collect();
    if curves.is_empty() {
        return None;
    }
    let (name, caption) = match mode {
        Mode::Serial | Mode::Sustained => {
            curves.extend(published("serial", clock, palette));
            ("startup-serial", "Serial start-up, from the start request to the container's first byte. ")
        }
        Mode::Parallel => (
            "startup-parallel",
            "Start-up of each pod of groups that started at once, from the start request to the first byte. ",
        ),
    };
    Some(Figure {
        name: name.into(),
        caption: format!("{caption}{}{}", virtually(clock), dashed(&curves, clock)),
        scene: distributions(&format!("Start-up, {mode}, {}", clock.ms()), &unit(clock, &curves), &curves),
    })
}

fn batches(report: &Report, palette: &Palette) -> Option<Figure> {
    let curve = |series: &Series| {
        let walls: Vec<f64> = series.walls().collect();
        let name = format!("{}, {} groups of {}", series.runtime, walls.len(), series.group);
        let ink = palette.ink(&series.runtime);
        (walls.len() > 1).then(|| Curve { name, points: cdf(&walls), ink, dots: false })
    };
    let mut curves: Vec<Curve> = report.series.iter().filter_map(curve).collect();
    if curves.is_empty() {
        return None;
    }
    if palette.beside_virtual || report.series.iter().any(|series| series.group == 50) {
        curves.extend(published("parallel-batch", report.clock, palette));
    }
    Some(Figure {
        name: "startup-batch".into(),
        caption: format!(
            "Time of whole groups: from the first start request to the last first byte. {}{}",
            virtually(report.clock),
            dashed(&curves, report.clock)
        ),
        scene: distributions(
            &format!("Start-up, whole groups, {}", report.clock.ms()),
            &unit(report.clock, &curves),
            &curves,
        ),
    })
}

fn dashed(curves: &[Curve], clock: Clock) -> &'static str {
    match (has_published(curves), clock) {
        (false, _) => "",
        (true, Clock::Wall) => {
            "Thin dashed lines are published figures from other hardware, for orientation only."
        }
        (true, Clock::Virtual) => {
            "Thin dashed lines are published figures in ms of other hardware: compare the distances between the two systems of one \
             source, not theirs with ours."
        }
    }
}

fn has_published(curves: &[Curve]) -> bool {
    curves.iter().any(|curve| matches!(curve.ink, Ink::Published(_)))
}

/// Returns the unit of an axis. Published times are wall times.
fn unit(clock: Clock, curves: &[Curve]) -> String {
    match clock {
        Clock::Virtual if has_published(curves) => "virtual ms; thin: ms of other hardware".into(),
        clock => clock.ms().into(),
    }
}

fn virtually(clock: Clock) -> &'static str {
    match clock {
        Clock::Wall => "",
        Clock::Virtual => "Virtual time: one instruction is one nanosecond, and a sleep counts in full. ",
    }
}

/// Returns published curves. They are wall times, so they are drawn beside virtual times only on request.
fn published(mode: &str, clock: Clock, palette: &Palette) -> Vec<Curve> {
    if clock == Clock::Virtual && !palette.beside_virtual {
        return Vec::new();
    }
    let anchors: Vec<Anchor> = anchors::all().into_iter().filter(|anchor| anchor.is_startup(mode)).collect();
    let curves = anchors.iter().filter_map(|anchor| match &anchor.figure {
        Published::StartUp { cdf, n: Some(n), group, .. } if !cdf.is_empty() => {
            let samples = if *group > 1 { format!("{n} × {group}") } else { format!("n = {n}") };
            Some((format!("{} published, {samples}, other hardware", anchor.system), cdf.clone()))
        }
        _ => None,
    });
    curves
        .enumerate()
        .map(|(index, (name, points))| Curve { name, points, ink: Ink::Published(index), dots: false })
        .collect()
}

fn stages(series: &Series, clock: Clock, palette: &Palette) -> Option<Figure> {
    if series.stages.is_empty() {
        return None;
    }
    let mut bars: Vec<Bar> = series
        .stages
        .iter()
        .filter_map(|(stage, summary)| {
            Some(Bar { name: stage.to_string(), length: summary.mean_ms?, ink: palette.ink(&series.runtime) })
        })
        .collect();
    let rest = series.unexplained.as_ref().and_then(|rest| rest.mean_ms).unwrap_or_default();
    bars.push(Bar { name: "unexplained".into(), length: rest, ink: Ink::Muted });
    let title = format!("Stages of {} {}: means, {}", series.runtime, series.mode, clock.ms());
    Some(Figure {
        name: format!("stages-{}-{}", file_name(&series.runtime), series.mode),
        caption: format!(
            "The daemon's own stages; with the rest they add up to the mean start. The rest is containerd, CNI, and \
             the path of the first byte to the log. {}",
            virtually(clock)
        ),
        scene: waterfall(&title, &bars),
    })
}

fn memory(report: &Report, palette: &Palette) -> Vec<Figure> {
    let mut runtimes: Vec<&str> = report.memory.iter().map(|row| row.runtime.as_str()).collect();
    runtimes.dedup();
    let curves = |kib: &dyn Fn(&crate::report::Memory) -> f64| -> Vec<Curve> {
        runtimes
            .iter()
            .map(|runtime| {
                let rows = report.memory.iter().filter(|row| row.runtime == *runtime);
                let points = rows.map(|row| (f64::from(row.pods), kib(row) / 1024.0)).collect();
                Curve { name: (*runtime).to_owned(), points, ink: palette.ink(runtime), dots: true }
            })
            .collect()
    };
    if report.memory.iter().map(|row| row.pods).max().unwrap_or_default() < 2 {
        return Vec::new();
    }
    let names = ("pods", "PSS, MB");
    let mut management = curves(&|row| row.management_pss_kib);
    let highest = management.iter().flat_map(|curve| &curve.points).map(|point| point.1).fold(0.0, f64::max);
    let most = report.memory.iter().map(|row| row.pods).max().unwrap_or_default();
    for (index, anchor) in anchors::all().iter().filter(|anchor| is_management(anchor)).enumerate() {
        let Published::Memory { pods, pss_mb, .. } = &anchor.figure else { continue };
        // Proportional for shims, up to the end of the measured curves; constant for a resident process.
        let (points, what) = if *pods == 1 {
            let end = f64::from(most).min(highest / pss_mb).max(1.0);
            (vec![(1.0, *pss_mb), (end, pss_mb * end)], format!("{pss_mb:.0} MB a pod"))
        } else {
            (vec![(1.0, *pss_mb), (f64::from(most), *pss_mb)], format!("{pss_mb:.0} MB flat"))
        };
        management.push(Curve {
            name: format!("{} published, {what}, other hardware", anchor.system),
            points,
            ink: Ink::Published(index),
            dots: false,
        });
    }
    vec![
        Figure {
            name: "memory-total".into(),
            caption:
                "Everything: resident process, shims, pause containers, monitors, guest memory, workloads."
                    .into(),
            scene: growth("Total memory, over pods", names, &curves(&|row| row.total_pss_kib)),
        },
        Figure {
            name: "memory-management".into(),
            caption: format!(
                "Management only, as in published figures: resident process and shims. {}",
                dashed(&management, Clock::Wall)
            ),
            scene: growth("Memory of management, over pods", names, &management),
        },
    ]
}

fn is_management(anchor: &Anchor) -> bool {
    matches!(&anchor.figure, Published::Memory { definition, .. } if definition == "management")
}
