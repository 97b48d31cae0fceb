//! Plots: a scene of lines, boxes and texts, laid out once and written as SVG or PNG.

mod axis;
pub mod bars;
pub mod curves;
pub mod intervals;
mod png;
mod scene;
mod svg;

pub use png::png;
pub use scene::{Anchor, Dash, Ink, Item, Scene};
pub use svg::{STYLE, escape, standalone, svg};
