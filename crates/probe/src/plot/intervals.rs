//! Groups of bars from zero, each bar with an interval.

use super::axis::{Axis, number};
use super::curves::fitting;
use super::scene::{Anchor, Dash, Ink, Item, Scene, TEXT, text_width};

const WIDTH: f32 = 440.0;
const NAMES: f32 = 150.0;
/// Width reserved for a value behind its bar.
const VALUES: f32 = 74.0;
const ROW: f32 = 22.0;
const TOP: f32 = 26.0;

/// A bar of a group.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// Name of the bar.
    pub name: String,
    /// Length of the bar, in the plot's unit.
    pub value: f64,
    /// Ends of the value's interval; `None` without one.
    pub interval: Option<(f64, f64)>,
    /// The value as text.
    pub shown: String,
    /// Colour of the bar.
    pub ink: Ink,
}

/// Bars below one heading.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// The heading; empty for none.
    pub name: String,
    /// The bars, from top to bottom.
    pub bars: Vec<Bar>,
}

/// Draws groups of bars on one axis, in `unit`.
pub fn intervals(title: &str, unit: &str, groups: &[Group]) -> Scene {
    let rows: usize = groups.iter().map(|group| group.bars.len() + usize::from(!group.name.is_empty())).sum();
    let bottom = TOP + rows as f32 * ROW;
    let mut scene = Scene::new(WIDTH, bottom + TEXT * 3.2, title);
    let bars = || groups.iter().flat_map(|group| &group.bars);
    let most = bars().map(|bar| bar.interval.map_or(bar.value, |ends| ends.1.max(bar.value)));
    let axis = Axis::linear(most.fold(0.0, f64::max), NAMES, WIDTH - VALUES);
    scene.text((0.0, TEXT), Anchor::Start, Ink::Text, fitting(title, WIDTH));
    ticks(&mut scene, &axis, bottom);
    scene.text((WIDTH - VALUES, bottom + TEXT * 2.7), Anchor::End, Ink::Text, unit);
    let mut y = TOP;
    for group in groups {
        if !group.name.is_empty() {
            scene.text((0.0, y + ROW * 0.7), Anchor::Start, Ink::Muted, fitting(&group.name, WIDTH));
            y += ROW;
        }
        for bar in &group.bars {
            draw(&mut scene, bar, &axis, y);
            y += ROW;
        }
    }
    scene
}

fn ticks(scene: &mut Scene, axis: &Axis, bottom: f32) {
    let mut free = f32::NEG_INFINITY;
    for value in axis.ticks() {
        let (at, text) = (axis.at(value), number(value));
        scene.line(vec![(at, TOP), (at, bottom)], Ink::Grid, 1.0, Dash::Solid);
        // Omits a number that would touch the one before it, as on other axes.
        let half = text_width(&text) / 2.0;
        if at - half > free {
            free = at + half + TEXT * 0.4;
            scene.text_within((at, bottom + TEXT * 1.3), Ink::Muted, text);
        }
    }
}

fn draw(scene: &mut Scene, bar: &Bar, axis: &Axis, y: f32) {
    let (left, right, middle) = (axis.at(0.0), axis.at(bar.value), y + ROW / 2.0);
    scene.text((NAMES - 8.0, y + ROW * 0.7), Anchor::End, Ink::Text, fitting(&bar.name, NAMES - 8.0));
    let title = match bar.interval {
        Some((low, high)) => format!("{}: {} ({low:.4} to {high:.4})", bar.name, bar.shown),
        None => format!("{}: {}", bar.name, bar.shown),
    };
    let at = [left, y + 4.0, (right - left).max(1.0), ROW - 8.0];
    scene.items.push(Item::Box { at, ink: bar.ink, title });
    let mut end = right;
    if let Some((low, high)) = bar.interval {
        let (from, to) = (axis.at(low), axis.at(high));
        end = end.max(to);
        scene.line(vec![(from, middle), (to, middle)], Ink::Text, 1.4, Dash::Solid);
        for at in [from, to] {
            scene.line(vec![(at, middle - 4.0), (at, middle + 4.0)], Ink::Text, 1.4, Dash::Solid);
        }
    }
    scene.text((end + 6.0, y + ROW * 0.7), Anchor::Start, Ink::Muted, bar.shown.clone());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_begin_at_zero_and_their_values_stay_inside() {
        let bar = |value: f64, interval| Bar {
            name: "a-runtime-with-a-name-that-is-long".into(),
            value,
            interval,
            shown: "123,456".into(),
            ink: Ink::Series(0),
        };
        let group = Group { name: "a".into(), bars: vec![bar(10.0, Some((8.0, 12.0))), bar(6.0, None)] };
        let scene = intervals("t", "ms", &[group]);
        let boxes: Vec<[f32; 4]> = scene
            .items
            .iter()
            .filter_map(|item| match item {
                Item::Box { at, .. } => Some(*at),
                _ => None,
            })
            .collect();
        assert_eq!((boxes.len(), boxes[0][0], boxes[1][0]), (2, NAMES, NAMES));
        assert!((boxes[1][2] / boxes[0][2] - 0.6).abs() < 0.01, "{boxes:?}");
        for item in &scene.items {
            if let Item::Text { at, anchor: Anchor::Start, text, .. } = item {
                assert!(at.0 + text_width(text) <= WIDTH && at.1 <= scene.height, "{item:?}");
            }
        }
    }
}
