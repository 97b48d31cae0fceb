//! A document as a self-contained HTML page.

use super::{Document, Part, Table};
use crate::plot::{STYLE, escape, svg};

const LAYOUT: &str = "\
*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:76rem;background:var(--paper);color:var(--ink);\
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.6rem;margin:.5rem 0}h2{font-size:1.3rem;margin:2rem 0 .5rem;\
border-top:1px solid var(--grid);padding-top:1rem}h3{font-size:1.05rem;margin:1.5rem 0 .5rem}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1.5rem}\
figure{margin:0;break-inside:avoid}figure svg{width:100%;max-width:34rem;height:auto;display:block}\
figcaption{color:var(--muted);font-size:.88rem}.wide{overflow-x:auto}\
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}\
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}\
th:first-child,td:first-child,.l{text-align:left}th{vertical-align:bottom}\
.wrap td{white-space:normal;overflow-wrap:anywhere;vertical-align:top}.wrap td:first-child{min-width:9rem}\
.badge{display:inline-block;border:1px solid var(--s1);color:var(--s1);border-radius:1rem;padding:0 .6rem;\
font-size:.85rem;margin-left:.4rem}.warn{border-left:4px solid var(--s1);padding:.1rem .8rem;margin:.6rem 0}\
.warn p{margin:.2rem 0}li,p,figcaption{overflow-wrap:anywhere}ul{padding-left:1.2rem}.muted{color:var(--muted)}summary{cursor:pointer;font-weight:600}\
@media screen{.wide th:first-child,.wide td:first-child{position:sticky;left:0;background:var(--paper)}}\
@media screen and (max-width:40rem){.wrap,.wrap tbody{display:block}.wrap thead{display:none}\
.wrap tr{display:block;padding:.4rem 0;border-bottom:1px solid var(--grid)}\
.wrap td{display:block;border:0;padding:0}.wrap td:first-child{position:static;font-weight:600}\
.wrap td:empty{display:none}.wrap td[data-of]::before{content:attr(data-of) \": \";color:var(--muted)}}\
@media print{body{max-width:none;padding:0;font-size:10pt}h2,h2+p,h3{break-after:avoid}tr,.warn,li{break-inside:avoid}\
.plots{grid-template-columns:1fr 1fr;gap:1rem}.wide{overflow:visible}table{font-size:8pt}\
th,td{padding:.15rem .3rem;white-space:normal}}";

/// Returns the page.
pub fn render(document: &Document) -> String {
    let title = escape(&document.title);
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>{title}</title>\
         <style>{STYLE}{LAYOUT}</style></head><body><h1>{title}</h1>"
    );
    parts(&mut out, &document.parts);
    out + "</body></html>\n"
}

fn parts(out: &mut String, all: &[Part]) {
    for part in all {
        let text = match part {
            Part::Heading { level, text, badges } => {
                let badge = |badge: &&str| format!("<span class=\"badge\">{}</span>", escape(badge));
                let badges: String = badges.iter().map(badge).collect();
                format!("<h{level}>{}{badges}</h{level}>", escape(text))
            }
            Part::Text(text) => format!("<p class=\"muted\">{}</p>", escape(text)),
            Part::List(lines) => {
                let item = |line: &String| format!("<li>{}</li>", escape(line));
                format!("<ul>{}</ul>", lines.iter().map(item).collect::<String>())
            }
            Part::Warning { seen, advice } => {
                let seen: Vec<String> = seen.iter().map(|line| escape(line)).collect();
                format!(
                    "<div class=\"warn\"><p><strong>{}</strong></p><p>{}</p></div>",
                    seen.join("<br>"),
                    escape(advice)
                )
            }
            Part::Table(rows) => table(rows),
            Part::Plots(figures) => {
                let plot = |scene: &str, caption: &str| {
                    format!("<figure>{scene}<figcaption>{}</figcaption></figure>", escape(caption))
                };
                let plots = figures.iter().map(|figure| plot(&svg(&figure.scene), &figure.caption));
                format!("<div class=\"plots\">{}</div>", plots.collect::<String>())
            }
            Part::Fold { title, open, parts: folded } => {
                let open = if *open { " open" } else { "" };
                *out += &format!("<details{open}><summary>{}</summary>", escape(title));
                parts(out, folded);
                "</details>".into()
            }
        };
        *out += &text;
    }
}

fn table(table: &Table) -> String {
    let stacks = table.is_prose && table.columns.len() > 2;
    let cell = |tag: &str, index: usize, text: &str| {
        let column = &table.columns[index];
        let class = if column.is_text { " class=\"l\"" } else { "" };
        // On narrow screens a row's cells are stacked, each with its heading.
        let heading = if stacks && tag == "td" && index > 0 {
            format!(" data-of=\"{}\"", escape(&column.name))
        } else {
            String::new()
        };
        format!("<{tag}{class}{heading}>{}</{tag}>", escape(text))
    };
    let line = |tag: &str, cells: &mut dyn Iterator<Item = &String>| -> String {
        let cells: String = cells.enumerate().map(|(index, text)| cell(tag, index, text)).collect();
        format!("<tr>{cells}</tr>")
    };
    let heading = line("th", &mut table.columns.iter().map(|column| &column.name));
    let rows: String = table.rows.iter().map(|row| line("td", &mut row.iter())).collect();
    let class = if table.is_prose { "wrap" } else { "" };
    format!(
        "<div class=\"wide\"><table class=\"{class}\"><thead>{heading}</thead><tbody>{rows}</tbody></table></div>"
    )
}
