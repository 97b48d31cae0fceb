//! A document as Markdown.

use super::{Document, Part, Table};

/// Returns the document as Markdown. Plots, and details of tables, are left out.
pub fn render(document: &Document) -> String {
    let mut out = String::new();
    parts(&mut out, &document.parts);
    out.trim_end().to_owned() + "\n"
}

fn parts(out: &mut String, all: &[Part]) {
    for part in all {
        let text = match part {
            Part::Heading { level, text, badges } => {
                let badges: String = badges.iter().map(|badge| format!(" (**{badge}**)")).collect();
                format!("{} {}{badges}", "#".repeat(usize::from(*level)), escape(text))
            }
            Part::Text(text) => escape(text),
            Part::List(lines) => list(lines),
            Part::Warning { seen, advice } => list(&[format!("{} {advice}", seen.join(" "))]),
            Part::Table(rows) => table(rows),
            Part::Plots(_) => continue,
            Part::Fold { title, parts: folded, .. } => {
                *out += &format!("### {}\n\n", escape(title));
                parts(out, folded);
                continue;
            }
        };
        if !text.is_empty() {
            *out += &format!("{text}\n\n");
        }
    }
}

fn list(lines: &[String]) -> String {
    lines.iter().map(|line| format!("- {}", escape(line))).collect::<Vec<_>>().join("\n")
}

fn table(table: &Table) -> String {
    let shown: Vec<usize> =
        (0..table.columns.len()).filter(|index| !table.columns[*index].is_detail).collect();
    let line = |cell: &dyn Fn(usize) -> String| {
        format!("| {} |", shown.iter().map(|index| cell(*index)).collect::<Vec<_>>().join(" | "))
    };
    let rule = shown.iter().map(|index| if table.columns[*index].is_text { "---|" } else { "--:|" });
    let mut lines =
        vec![line(&|index| escape(&table.columns[index].name)), format!("|{}", rule.collect::<String>())];
    lines.extend(table.rows.iter().map(|row| line(&|index| escape(&row[index]))));
    lines.join("\n")
}

/// Escapes a text for a paragraph or a cell.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '|' | '\\' | '`' | '*' | '_' | '<' | '[' => escaped.extend(['\\', character]),
            other if other.is_control() => escaped.push(' '),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_never_markup_and_details_are_left_out() {
        let mut table = Table::new(1, ["a|b", "n", "sd"]).with_details(&["sd"]);
        table.row(["*x*\n", "5", "0.1"]);
        let parts = vec![Part::heading("a_run"), Part::Table(table), Part::List(vec!["<note>".into()])];
        let text = render(&Document { title: String::new(), parts });
        assert_eq!(text, "### a\\_run\n\n| a\\|b | n |\n|---|--:|\n| \\*x\\*  | 5 |\n\n- \\<note>\n");
    }
}
