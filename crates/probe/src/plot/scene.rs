//! Elements of a plot, independent of the output format.

/// Colours by meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// Colour of texts and axes.
    Text,
    /// Colour of ticks' texts and remarks.
    Muted,
    /// Colour of grid lines.
    Grid,
    /// Colour of a measured series, by its number.
    Series(usize),
    /// Colour of a published figure, by its number.
    Published(usize),
}

/// Dash pattern of a line: distinguishes series without colour.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Dash {
    /// A solid line.
    Solid,
    /// Lengths of dashes and gaps in turn, an even number of them.
    Dashed(&'static [f32]),
}

/// Which point of a text is at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anchor {
    /// The text's left end.
    Start,
    /// The text's middle.
    Middle,
    /// The text's right end.
    End,
}

/// An element of a plot. Positions are in units of the scene; y grows downwards.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// A line through points.
    Line {
        /// The points, as x and y.
        points: Vec<(f32, f32)>,
        /// Colour of the line.
        ink: Ink,
        /// Width of the line.
        width: f32,
        /// Dash pattern of the line.
        dash: Dash,
    },
    /// A filled box.
    Box {
        /// Left, top, width and height of the box.
        at: [f32; 4],
        /// Colour of the box.
        ink: Ink,
        /// Tooltip; may be empty.
        title: String,
    },
    /// A dot.
    Dot {
        /// Centre of the dot, as x and y.
        at: (f32, f32),
        /// Colour of the dot.
        ink: Ink,
    },
    /// A text on one line.
    Text {
        /// Position of the text on its baseline, as x and y.
        at: (f32, f32),
        /// Which point of the text is at `at`.
        anchor: Anchor,
        /// Colour of the text.
        ink: Ink,
        /// The text itself.
        text: String,
    },
}

/// A plot.
#[derive(Debug, Clone, PartialEq)]
pub struct Scene {
    /// Width of the scene.
    pub width: f32,
    /// Height of the scene.
    pub height: f32,
    /// Description for screen readers.
    pub title: String,
    /// Elements in drawing order.
    pub items: Vec<Item>,
}

/// Height of a text, in units of the scene.
pub const TEXT: f32 = 14.0;

impl Scene {
    /// Creates an empty scene.
    pub fn new(width: f32, height: f32, title: impl Into<String>) -> Self {
        Self { width, height, title: title.into(), items: Vec::new() }
    }

    /// Adds a text.
    pub fn text(&mut self, at: (f32, f32), anchor: Anchor, ink: Ink, text: impl Into<String>) {
        self.items.push(Item::Text { at, anchor, ink, text: text.into() });
    }

    /// Adds a text centred at a position, shifted left at the right edge.
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

/// Padding on each side of a standalone picture.
pub const PAD: f32 = 8.0;

/// Returns the approximate width of a text in a wide font.
pub fn text_width(text: &str) -> f32 {
    text.chars().count() as f32 * TEXT * 0.62
}
