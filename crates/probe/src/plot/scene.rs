//! What is on a plot, before it is a picture.

/// Colours by meaning; what they look like is decided where they are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// Texts and axes.
    Text,
    /// Ticks' texts and remarks.
    Muted,
    /// Lines of the grid.
    Grid,
    /// One of the measured series.
    Series(usize),
    /// A published figure.
    Published(usize),
}

/// How a line is broken: series stay apart without their colours.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Dash {
    /// Not at all.
    Solid,
    /// Lengths of dashes and gaps in turn, an even number of them.
    Dashed(&'static [f32]),
}

/// Which end of a text its position is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// Its left end.
    Start,
    /// Its middle.
    Middle,
    /// Its right end.
    End,
}

/// A thing on a plot. Positions in units of the scene, y downwards.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// A line through points.
    Line {
        /// x, y.
        points: Vec<(f32, f32)>,
        /// Colour.
        ink: Ink,
        /// Width.
        width: f32,
        /// Breaks.
        dash: Dash,
    },
    /// A filled box.
    Box {
        /// Left, top, width, height.
        at: [f32; 4],
        /// Colour.
        ink: Ink,
        /// What it stands for, shown when pointed at; may be empty.
        title: String,
    },
    /// A dot.
    Dot {
        /// Centre.
        at: (f32, f32),
        /// Colour.
        ink: Ink,
    },
    /// A text on one line.
    Text {
        /// Of its base line.
        at: (f32, f32),
        /// Which end `at` is.
        anchor: Anchor,
        /// Colour.
        ink: Ink,
        /// The text.
        text: String,
    },
}

/// A plot.
#[derive(Debug, Clone, PartialEq)]
pub struct Scene {
    /// Width.
    pub width: f32,
    /// Height.
    pub height: f32,
    /// What it shows, for those who cannot see it.
    pub title: String,
    /// Drawn in this order.
    pub items: Vec<Item>,
}

/// Height of a text, in units of a scene.
pub const TEXT: f32 = 14.0;

impl Scene {
    /// Returns an empty one.
    pub fn new(width: f32, height: f32, title: impl Into<String>) -> Self {
        Self { width, height, title: title.into(), items: Vec::new() }
    }

    /// Adds a text.
    pub fn text(&mut self, at: (f32, f32), anchor: Anchor, ink: Ink, text: impl Into<String>) {
        self.items.push(Item::Text { at, anchor, ink, text: text.into() });
    }

    /// Adds a text around a position, or as near to it as the right edge lets it.
    pub fn text_within(&mut self, at: (f32, f32), ink: Ink, text: impl Into<String>) {
        let text = text.into();
        let middle = at.0.min(self.width - text_width(&text) / 2.0);
        self.text((middle, at.1), Anchor::Middle, ink, text);
    }

    /// Adds a line.
    pub fn line(&mut self, points: Vec<(f32, f32)>, ink: Ink, width: f32, dash: Dash) {
        self.items.push(Item::Line { points, ink, width, dash });
    }
}

/// How much wider and higher a picture of its own is than its scene, on each side.
pub const PAD: f32 = 8.0;

/// Estimates the width of a text in a wide font.
pub fn text_width(text: &str) -> f32 {
    text.chars().count() as f32 * TEXT * 0.62
}
