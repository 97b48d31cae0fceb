//! Tables for a terminal.

use comfy_table::{CellAlignment, Table, presets};

/// Returns a table: the first `texts` columns are text, the others numbers.
pub fn table(heading: &[&str], texts: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(heading.to_vec());
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if index >= texts {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Formats a time in ms; "–" for none.
pub fn ms(time: Option<f64>) -> String {
    match time {
        None => "–".into(),
        Some(time) if time < 10.0 => format!("{time:.2}"),
        Some(time) if time < 100.0 => format!("{time:.1}"),
        Some(time) => format!("{time:.0}"),
    }
}
