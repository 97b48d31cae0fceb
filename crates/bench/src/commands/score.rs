//! `sandboxer-bench score`: verdicts on results.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use sandboxer_bench::score::figures::{figure, remarks};
use sandboxer_bench::score::gate::{self, Judged};
use sandboxer_bench::score::levels::{Cell, Scores, Sum, System, grade};
use sandboxer_bench::score::published::{self, Check};
use sandboxer_bench::score::sheet::{Feature, Gate, Levels, Sheet, Sla};
use sandboxer_bench::score::sla::{self, Score};
use sandboxer_command::{Global, output};
use sandboxer_probe::document::Table;
use sandboxer_probe::results::Results;
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  sandboxer-bench score results/workload results/startup --sheet gate
  sandboxer-bench score results/workload --sheet desmet --baseline runc
  sandboxer-bench score --sheet desmet --published
  sandboxer-bench score results/workload --sheet rules.toml --json";

/// Judge results by a sheet of rules: a gate, rates under bounds of latency, or scores
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Directories that `workload` or `startup` wrote
    #[arg(required_unless_present = "published")]
    results: Vec<PathBuf>,
    /// Rules: gate, sla, desmet, or a TOML file
    #[arg(long)]
    sheet: String,
    /// Runtime that others are compared with [default: the sheet's]
    #[arg(long)]
    baseline: Option<String>,
    /// Score the thesis' published figures instead, and compare with its published scores; sheets of levels only
    #[arg(long, conflicts_with_all = ["results", "baseline"])]
    published: bool,
}

/// A verdict with remarks on it.
#[derive(Serialize)]
struct Verdicts<'a, T: Serialize> {
    sheet: &'a str,
    baseline: &'a str,
    remarks: Vec<String>,
    verdicts: T,
}

/// Judges and prints. Returns an error if a gate does not pass.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let mut sheet = sheet(&args.sheet)?;
    if let Some(name) = &args.baseline {
        *sheet.baseline_mut() = name.clone();
    }
    if args.published {
        let Sheet::Levels(levels) = &sheet else {
            bail!("--published needs a sheet of levels, such as desmet")
        };
        return published_scores(levels, global);
    }
    let results = Results::load(&args.results)?;
    let known = results.runtimes();
    if !known.iter().any(|runtime| runtime == sheet.baseline()) {
        bail!(
            "no result has the baseline '{}': choose --baseline from {}",
            sheet.baseline(),
            known.join(", ")
        );
    }
    match &sheet {
        Sheet::Gate(rules) => gated(rules, &results, global),
        Sheet::Sla(rules) => rates(rules, &results, global),
        Sheet::Levels(rules) => scores(rules, &results, global),
    }
}

fn sheet(name: &str) -> Result<Sheet> {
    if let Some(sheet) = Sheet::built_in(name) {
        return Ok(sheet);
    }
    let text = std::fs::read_to_string(name).with_context(|| {
        format!("cannot read sheet {name}: name a TOML file, or one of {}", Sheet::names().join(", "))
    })?;
    Sheet::parse(&text).with_context(|| format!("cannot use sheet {name}"))
}

fn show<T: Serialize>(verdicts: &Verdicts<'_, T>, text: String, global: &Global) -> Result<()> {
    if global.json {
        return output::print_json(verdicts);
    }
    let notes: String = verdicts.remarks.iter().map(|remark| format!("\nnote: {remark}")).collect();
    Ok(output::print(&(text.trim_end().to_owned() + &notes))?)
}

fn gated(rules: &Gate, results: &Results, global: &Global) -> Result<()> {
    let judged = gate::judge(rules, results);
    let over = format!("over {}", rules.baseline);
    let mut rows = Table::new(4, ["what", "metric", "runtime", "verdict", &over, "failed; baseline's"]);
    for row in &judged {
        let ratio = row.ratio.map_or_else(|| "–".into(), |ratio| ratio.short());
        let [own, of_baseline] = row.failures;
        let failed = format!("{own}; {of_baseline}");
        rows.row([&row.what, &row.metric, &row.runtime, row.verdict.as_str(), &ratio, &failed]);
    }
    let passed = judged.iter().filter(|row| row.verdict.passes()).count();
    let text = format!(
        "{}\n{passed} of {} metrics pass: within {} % of {}, or better",
        rows,
        judged.len(),
        rules.tolerance_percent,
        rules.baseline
    );
    let verdicts = Verdicts {
        sheet: &rules.name,
        baseline: &rules.baseline,
        remarks: remarks(results),
        verdicts: &judged,
    };
    show(&verdicts, text, global)?;
    verdict(&judged, passed)
}

fn verdict(judged: &[Judged], passed: usize) -> Result<()> {
    match judged.len() {
        0 => bail!("the results have nothing beside the baseline: there is nothing to judge"),
        all if all == passed => Ok(()),
        all => {
            bail!("the gate does not pass: {} of {all} metrics are not shown to be within it", all - passed)
        }
    }
}

fn rates(rules: &Sla, results: &Results, global: &Global) -> Result<()> {
    let scores = sla::score(rules, results);
    let bounds: Vec<String> = rules.bounds_ms.iter().map(|bound| format!("≤ {bound} ms")).collect();
    let over = format!("over {}", rules.baseline);
    let mut heading = vec!["result", "runtime"];
    heading.extend(bounds.iter().map(String::as_str).chain(["score", &over]));
    let mut rows = Table::new(2, heading);
    for score in &scores {
        rows.row(rates_of(score));
    }
    let text = format!(
        "{}\nhighest rate per s whose {} keeps the bound; +: the ladder has no higher one. Score: geometric mean",
        rows, rules.latency
    );
    let verdicts = Verdicts {
        sheet: &rules.name,
        baseline: &rules.baseline,
        remarks: remarks(results),
        verdicts: &scores,
    };
    show(&verdicts, text, global)
}

fn rates_of(score: &Score) -> Vec<String> {
    let rate = |(rate, top): (&Option<f64>, &bool)| match rate {
        Some(rate) => format!("{rate:.0}{}", if *top { "+" } else { "" }),
        None => "none".into(),
    };
    let or_none =
        |value: Option<f64>, digits: usize| value.map_or_else(|| "–".into(), |v| format!("{v:.digits$}"));
    let mut row = vec![score.result.clone(), score.runtime.clone()];
    row.extend(score.rates.iter().zip(&score.at_top).map(rate));
    row.extend([or_none(score.score, 0), or_none(score.over_baseline, 2)]);
    row
}

fn scores(rules: &Levels, results: &Results, global: &Global) -> Result<()> {
    let system = |name: &String| {
        let of_feature =
            |feature: &Feature| Some((feature.name.clone(), figure(results, feature.from.as_ref()?, name)?));
        System { name: name.clone(), figures: rules.features.iter().filter_map(of_feature).collect() }
    };
    let others: Vec<System> =
        results.runtimes().iter().filter(|name| **name != rules.baseline).map(system).collect();
    let scores = grade(rules, &system(&rules.baseline), &others);
    let text = scores_text(&scores);
    let verdicts = Verdicts {
        sheet: &rules.name,
        baseline: &rules.baseline,
        remarks: remarks(results),
        verdicts: &scores,
    };
    show(&verdicts, text, global)
}

fn scores_text(scores: &Scores) -> String {
    let names: Vec<&str> = scores.systems.iter().map(|system| &*system.system).collect();
    let mut rows = Table::new(2, [&["feature", "level"], &names[..]].concat());
    let Some(first) = scores.systems.first() else {
        return format!("nothing was measured beside {}", scores.baseline);
    };
    for (index, cell) in first.cells.iter().enumerate() {
        let mut row = vec![cell.feature.clone(), cell.level.clone()];
        row.extend(scores.systems.iter().map(|system| shown(&system.cells[index])));
        rows.row(row);
    }
    for level in first.sums.keys() {
        let mut row = vec!["sum".to_owned(), level.clone()];
        row.extend(scores.systems.iter().map(|system| system.sums.get(level).map_or_else(String::new, sum)));
        rows.row(row);
    }
    format!(
        "{}\nscore (percentage of {}); *: by the median, or at an end of the 95 % interval, it is another one",
        rows, scores.baseline
    )
}

fn shown(cell: &Cell) -> String {
    match cell.score.zip(cell.percent) {
        Some((score, percent)) => {
            format!("{score}{} ({percent:.1} %)", if cell.changes() { "*" } else { "" })
        }
        None => "not measured".into(),
    }
}

fn sum(sum: &Sum) -> String {
    let median =
        if sum.by_median == sum.score { String::new() } else { format!(", {} by median", sum.by_median) };
    format!("{} of {}{median}, {} of {} measured", sum.score, sum.attainable, sum.measured, sum.features)
}

fn published_scores(rules: &Levels, global: &Global) -> Result<()> {
    let check: Check = published::check(rules);
    if global.json {
        return output::print_json(&check);
    }
    let mut text = scores_text(&check.scores);
    text += &format!(
        "\n{} of {} published scores follow from the published means",
        check.cells - check.contradictions.len(),
        check.cells
    );
    for contradiction in &check.contradictions {
        text += &format!(
            "\n{} {}: {:.1} % of the baseline, published {}, by the rule {}",
            contradiction.system,
            contradiction.feature,
            contradiction.percent,
            contradiction.published,
            contradiction.by_rule
        );
    }
    Ok(output::print(&text)?)
}
