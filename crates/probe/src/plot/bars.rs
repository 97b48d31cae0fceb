//! A waterfall: the stages of a start one after the other, and the unexplained rest.

use super::axis::{Axis, number};
use super::curves::fitting;
use super::scene::{Anchor, Dash, Ink, Item, Scene, TEXT};

const WIDTH: f32 = 440.0;
const NAMES: f32 = 135.0;
const ROW: f32 = 24.0;
const TOP: f32 = 26.0;

/// A bar of a waterfall.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Name of the stage.
    pub name: String,
    /// Length of the bar, ms.
    pub length: f64,
    /// Colour of the bar.
    pub ink: Ink,
}

/// Returns bars that each begin at the end of the one before.
pub fn waterfall(title: &str, bars: &[Bar]) -> Scene {
    let total: f64 = bars.iter().map(|bar| bar.length.max(0.0)).sum();
    let mut scene = Scene::new(WIDTH, TOP + bars.len() as f32 * ROW + TEXT * 2.2, title);
    let bottom = TOP + bars.len() as f32 * ROW;
    // Leaves space for the last bar's number and for half of the last tick's.
    let axis = Axis::linear(total * 1.16, NAMES, WIDTH - 16.0);
    scene.text((0.0, TEXT), Anchor::Start, Ink::Text, fitting(title, WIDTH));
    for value in axis.ticks() {
        let at = axis.at(value);
        scene.line(vec![(at, TOP), (at, bottom)], Ink::Grid, 1.0, Dash::Solid);
        scene.text_within((at, bottom + TEXT * 1.3), Ink::Muted, number(value));
    }
    let mut begin = 0.0;
    for (index, bar) in bars.iter().enumerate() {
        let y = TOP + index as f32 * ROW;
        let end = begin + bar.length.max(0.0);
        let (left, right) = (axis.at(begin), axis.at(end));
        scene.text((NAMES - 8.0, y + ROW * 0.66), Anchor::End, Ink::Text, bar.name.clone());
        scene.items.push(Item::Box {
            at: [left, y + 4.0, (right - left).max(1.0), ROW - 8.0],
            ink: bar.ink,
            title: format!("{}: {:.1} ms", bar.name, bar.length),
        });
        let length =
            if bar.length < 100.0 { format!("{:.1}", bar.length) } else { format!("{:.0}", bar.length) };
        scene.text((right + 5.0, y + ROW * 0.66), Anchor::Start, Ink::Muted, length);
        begin = end;
    }
    scene
}
