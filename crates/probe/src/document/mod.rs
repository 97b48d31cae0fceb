//! A document of headings, texts, tables and plots, and three renderers: [`html`] for a page, [`markdown`], and
//! [`terminal`].

pub mod html;
pub mod markdown;
pub mod terminal;

use crate::figures::Figure;

/// What is shown of results.
#[derive(Debug, Clone, Default)]
pub struct Document {
    /// Title of the page; other renderers have none.
    pub title: String,
    /// The parts, in order.
    pub parts: Vec<Part>,
}

/// A part of a document.
#[derive(Debug, Clone)]
pub enum Part {
    /// The heading of a section (2) or of a part of it (3).
    Heading {
        /// Level of the heading.
        level: u8,
        /// Text of the heading.
        text: String,
        /// Properties of the section that no reader must miss.
        badges: Vec<&'static str>,
    },
    /// A paragraph that explains what follows or precedes it.
    Text(String),
    /// Remarks, one a line.
    List(Vec<String>),
    /// Observations that limit what the figures show.
    Warning {
        /// The observations.
        seen: Vec<String>,
        /// What to make of them.
        advice: &'static str,
    },
    /// A table.
    Table(Table),
    /// Plots; only a page has them.
    Plots(Vec<Figure>),
    /// Parts that a page shows on request.
    Fold {
        /// Title of the parts.
        title: String,
        /// Whether a page shows them at first.
        open: bool,
        /// The parts.
        parts: Vec<Part>,
    },
}

impl Part {
    /// Returns the heading of a part of a section.
    pub fn heading(text: impl Into<String>) -> Self {
        Part::Heading { level: 3, text: text.into(), badges: Vec::new() }
    }
}

/// A table.
#[derive(Debug, Clone)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
    /// Whether cells have sentences, which a page wraps.
    is_prose: bool,
}

#[derive(Debug, Clone)]
struct Column {
    name: String,
    is_text: bool,
    /// Whether a short table leaves the column out.
    is_detail: bool,
}

impl Table {
    /// Returns a table without rows: the first `texts` columns are text, the others numbers.
    pub fn new<T: Into<String>>(texts: usize, names: impl IntoIterator<Item = T>) -> Self {
        let column = |(index, name): (usize, T)| Column {
            name: name.into(),
            is_text: index < texts,
            is_detail: false,
        };
        Self {
            columns: names.into_iter().enumerate().map(column).collect(),
            rows: Vec::new(),
            is_prose: false,
        }
    }

    /// Returns the table with these columns as details, which Markdown leaves out.
    pub fn with_details(mut self, names: &[&str]) -> Self {
        for column in &mut self.columns {
            column.is_detail = names.contains(&&*column.name);
        }
        self
    }

    /// Returns the table with this column as text, too.
    pub fn with_text(mut self, name: &str) -> Self {
        self.columns.iter_mut().filter(|column| column.name == name).for_each(|column| column.is_text = true);
        self
    }

    /// Returns the table as one whose cells have sentences.
    pub fn with_prose(self) -> Self {
        Self { is_prose: true, ..self }
    }

    /// Adds a row. Columns without a cell are shown as "–".
    pub fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        let mut row: Vec<String> = cells.into_iter().map(Into::into).collect();
        row.resize(self.columns.len(), "–".into());
        self.rows.push(row);
    }

    /// Returns whether the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// Formats a value by `shown`; "–" for none.
pub fn or_none<T>(value: Option<T>, shown: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "–".into(), shown)
}

/// Formats a time in ms with three digits; "–" for none.
pub fn ms(time: Option<f64>) -> String {
    or_none(time, |time| match time {
        ..10.0 => format!("{time:.2}"),
        ..100.0 => format!("{time:.1}"),
        _ => format!("{time:.0}"),
    })
}

/// Formats KiB as MB; 1 MB is 1024 KiB here.
pub fn mb(kib: f64) -> String {
    format!("{:.1}", kib / 1024.0)
}
