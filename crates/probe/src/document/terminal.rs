//! A document as text for a terminal.

use std::fmt::{self, Display, Formatter};

use super::{Document, Part, Table};

/// Returns the document as text. Plots are left out.
pub fn render(document: &Document) -> String {
    let mut out = String::new();
    parts(&mut out, &document.parts);
    out.trim().to_owned()
}

fn parts(out: &mut String, all: &[Part]) {
    for part in all {
        let text = match part {
            Part::Heading { text, badges, .. } => [&[text.as_str()], &badges[..]].concat().join(", "),
            Part::Text(text) => text.clone(),
            Part::List(lines) => lines.join("\n"),
            Part::Warning { seen, advice } => format!("{}\n{advice}", seen.join("\n")),
            Part::Table(table) => table.to_string(),
            Part::Plots(_) => continue,
            Part::Fold { title, parts: folded, .. } => {
                *out += &format!("{title}\n\n");
                parts(out, folded);
                continue;
            }
        };
        if !text.is_empty() {
            *out += &format!("{text}\n\n");
        }
    }
}

/// Formats as aligned columns, two spaces apart: texts to the left, numbers to the right.
impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let heading: Vec<String> = self.columns.iter().map(|column| column.name.clone()).collect();
        let lines = || std::iter::once(&heading).chain(&self.rows);
        let width = |index: usize| lines().map(|row| row[index].chars().count()).max().unwrap_or_default();
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for (number, row) in lines().enumerate() {
            let cells = row.iter().zip(&self.columns).zip(&widths).map(|((cell, column), width)| {
                if column.is_text { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
            let line = cells.collect::<Vec<_>>().join("  ");
            write!(f, "{}{}", if number > 0 { "\n" } else { "" }, line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_on_the_left_and_numbers_on_the_right() {
        let mut table = Table::new(1, ["runtime", "n", "what"]);
        table.row(["runc", "5"]);
        table.row(["sandboxer", "123", "×"]);
        assert_eq!(table.to_string(), "runtime      n  what\nrunc         5     –\nsandboxer  123     ×");
    }
}
