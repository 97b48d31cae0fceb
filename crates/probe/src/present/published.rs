//! Published figures: for orientation only, so no ratios to them are shown.

use crate::anchors::{self, Anchor, Figure};
use crate::clock::Clock;
use crate::document::{Part, Table};
use crate::report::Report;

/// Returns all published figures.
pub fn all() -> Vec<Anchor> {
    anchors::all()
}

/// Returns the published figures that stand beside those of the reports. Published times are wall times.
pub fn comparable(reports: &[&Report]) -> Vec<Anchor> {
    let series =
        || reports.iter().filter(|report| report.clock == Clock::Wall).flat_map(|report| &report.series);
    let (starts, groups) = (series().next().is_some(), series().any(|series| !series.batch_ms.is_empty()));
    let memory = reports.iter().any(|report| !report.memory.is_empty());
    let stands_beside = |anchor: &Anchor| match &anchor.figure {
        Figure::StartUp { mode, n: Some(_), .. } => {
            starts && mode == "serial" || groups && mode == "parallel-batch"
        }
        Figure::StartUp { .. } => false,
        Figure::Memory { definition, .. } => memory && definition == "management",
    };
    anchors::all().into_iter().filter(stands_beside).collect()
}

/// Returns a table of these figures; nothing without figures.
pub fn section(anchors: Vec<Anchor>) -> Vec<Part> {
    if anchors.is_empty() {
        return Vec::new();
    }
    let names = ["system", "what", "figure", "on", "note", "source"];
    let mut table = Table::new(6, names).with_prose().with_details(&["note", "source"]);
    for anchor in anchors {
        let (what, figure) = match &anchor.figure {
            Figure::StartUp { measures, n, statistic, ms, p95_ms, p99_ms, .. } => {
                let n = n.map_or_else(|| "n not stated".into(), |n| format!("n = {n}"));
                let more = [("p95", p95_ms), ("p99", p99_ms)];
                let more: String = more
                    .iter()
                    .filter_map(|(name, value)| Some(format!(", {name} {:.0}", value.as_ref()?)))
                    .collect();
                (measures.clone(), format!("{} {ms:.0}{more} ms, {n}", statistic.as_str()))
            }
            Figure::Memory { pods, definition, pss_mb } => {
                (format!("memory, {definition}, pods: {pods}"), format!("{pss_mb:.0} MB"))
            }
        };
        table.row([anchor.name(), what, figure, anchor.hardware, anchor.note, anchor.source]);
    }
    let text =
        "Measured on other hardware, by other methods: for orientation only. No ratios to them are shown.";
    let heading = Part::Heading { level: 2, text: "Published figures".into(), badges: Vec::new() };
    vec![heading, Part::Text(text.into()), Part::Table(table)]
}
