//! Curves over an axis: distributions of start-up times, memory over pod counts.

use super::axis::{Axis, frame};
use super::scene::{Anchor, Dash, Ink, Item, Scene, TEXT, text_width};

const WIDTH: f32 = 440.0;
const HEIGHT: f32 = 340.0;
/// Margins of the plot's area: left, top, right, bottom.
const MARGIN: [f32; 4] = [54.0, 50.0, 12.0, 46.0];
/// Length of a line in the legend: its longest pattern fits once.
const SWATCH: f32 = 34.0;
/// Ratio of the largest count to the smallest above which the axis of counts is logarithmic.
const WIDE: f64 = 60.0;
/// Maximum number of points drawn per curve: about the number of pixels.
const POINTS: usize = 400;

/// A curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Name of the series.
    pub name: String,
    /// x and y, ascending in x.
    pub points: Vec<(f64, f64)>,
    /// Colour of the curve. A published curve is thinner and dashed.
    pub ink: Ink,
    /// Whether to draw a dot at each point.
    pub dots: bool,
}

/// Draws distributions: times in `unit`, and the fraction of starts or groups at or below each.
pub fn distributions(title: &str, unit: &str, curves: &[Curve]) -> Scene {
    let ends = |curve: &Curve| Some((curve.points.first()?.0, curve.points.last()?.0));
    let ends: Vec<(f64, f64)> = curves.iter().filter_map(ends).collect();
    let least = ends.iter().map(|end| end.0).fold(f64::INFINITY, f64::min);
    let most = ends.iter().map(|end| end.1).fold(0.0, f64::max);
    let (scene, legend) = area(title, curves.len());
    let x = Axis::spanning(least, most, MARGIN[0], WIDTH - MARGIN[2]);
    let y = Axis::linear(1.0, HEIGHT - MARGIN[3], MARGIN[1]);
    let steps: Vec<Curve> = curves.iter().map(stepped).collect();
    let name = if x.is_logarithmic() { format!("{unit}, logarithmic") } else { unit.to_owned() };
    draw(scene, &steps, &x, &y, (&name, "fraction at or below"), true, legend)
}

/// Draws percentiles of latencies in `unit`: a few points of each distribution, joined by lines.
pub fn percentiles(title: &str, unit: &str, curves: &[Curve]) -> Scene {
    let times = || curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.0));
    let (least, most) = (times().fold(f64::INFINITY, f64::min), times().fold(0.0, f64::max));
    let (scene, legend) = area(title, curves.len());
    let x = Axis::spanning(least, most, MARGIN[0], WIDTH - MARGIN[2]);
    let y = Axis::linear(1.0, HEIGHT - MARGIN[3], MARGIN[1]);
    let name = if x.is_logarithmic() { format!("{unit}, logarithmic") } else { unit.to_owned() };
    draw(scene, curves, &x, &y, (&name, "fraction at or below"), true, legend)
}

/// Draws amounts over counts, both from zero.
pub fn growth(title: &str, names: (&str, &str), curves: &[Curve]) -> Scene {
    let all = curves.iter().flat_map(|curve| &curve.points);
    let most = all.fold((0.0f64, 0.0f64), |most, point| (most.0.max(point.0), most.1.max(point.1)));
    let (scene, legend) = area(title, curves.len());
    let least = curves.iter().filter_map(|curve| curve.points.first()).map(|point| point.0);
    let x = match least.fold(f64::INFINITY, f64::min) {
        // Counts that double or more each time.
        least if most.0 / least > WIDE => Axis::spanning(least, most.0, MARGIN[0], WIDTH - MARGIN[2]),
        _ => Axis::linear(most.0 * 1.03, MARGIN[0], WIDTH - MARGIN[2]),
    };
    let name = if x.is_logarithmic() { format!("{}, logarithmic", names.0) } else { names.0.to_owned() };
    let y = Axis::linear(most.1 * 1.05, HEIGHT - MARGIN[3], MARGIN[1]);
    draw(scene, curves, &x, &y, (name.trim_start_matches(", "), names.1), false, legend)
}

/// Returns a scene with space for a legend below the area.
fn area(title: &str, curves: usize) -> (Scene, f32) {
    let legend = HEIGHT + 4.0;
    let mut scene = Scene::new(WIDTH, legend + curves as f32 * TEXT * 1.5 + 6.0, title);
    scene.text((0.0, TEXT), Anchor::Start, Ink::Text, fitting(title, WIDTH));
    (scene, legend)
}

/// Returns a distribution as steps, rising at each sample.
fn stepped(curve: &Curve) -> Curve {
    let thin = thinned(&curve.points);
    let mut points = Vec::with_capacity(2 * thin.len() + 1);
    let mut last = 0.0;
    for (x, y) in thin {
        points.push((x, last));
        points.push((x, y));
        last = y;
    }
    Curve { points, ..curve.clone() }
}

fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= POINTS {
        return points.to_vec();
    }
    (0..POINTS).map(|index| points[index * (points.len() - 1) / (POINTS - 1)]).collect()
}

fn draw(
    mut scene: Scene,
    curves: &[Curve],
    x: &Axis,
    y: &Axis,
    names: (&str, &str),
    percent: bool,
    legend: f32,
) -> Scene {
    frame(&mut scene, x, y, names, percent);
    for (index, curve) in curves.iter().enumerate() {
        let points: Vec<(f32, f32)> = curve.points.iter().map(|&(a, b)| (x.at(a), y.at(b))).collect();
        let (width, dash) = look(curve.ink);
        if curve.dots {
            scene.items.extend(points.iter().map(|&at| Item::Dot { at, ink: curve.ink }));
        }
        scene.line(points, curve.ink, width, dash);
        let at = legend + (index as f32 + 0.8) * TEXT * 1.5;
        scene.line(vec![(0.0, at - 4.0), (SWATCH, at - 4.0)], curve.ink, width, dash);
        let (left, name) = (SWATCH + 8.0, fitting(&curve.name, WIDTH - SWATCH - 8.0));
        scene.text((left, at), Anchor::Start, Ink::Text, name);
    }
    scene
}

/// Dash patterns, as many as colours, so that the first six series differ in both.
const SERIES: [Dash; 6] = [
    Dash::Solid,
    Dash::Dashed(&[14.0, 4.0]),
    Dash::Dashed(&[3.0, 3.0]),
    Dash::Dashed(&[14.0, 4.0, 3.0, 4.0]),
    Dash::Dashed(&[7.0, 4.0]),
    Dash::Dashed(&[14.0, 3.0, 3.0, 3.0, 3.0, 3.0]),
];

/// Returns the width and dash pattern of a line, which identify a series without colour.
pub fn look(ink: Ink) -> (f32, Dash) {
    match ink {
        Ink::Series(index) => (2.4, SERIES[index % SERIES.len()]),
        Ink::Published(0) => (1.4, Dash::Dashed(&[6.0, 5.0])),
        Ink::Published(_) => (1.4, Dash::Dashed(&[2.0, 5.0])),
        _ => (1.0, Dash::Solid),
    }
}

/// Returns a text shortened to the available width.
pub fn fitting(text: &str, width: f32) -> String {
    if text_width(text) <= width {
        return text.to_owned();
    }
    let max_chars = (width / text_width("x")) as usize;
    text.chars().take(max_chars.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_points_are_thinned_and_both_ends_stay() {
        let points: Vec<_> = (0..10_000).map(|n| (f64::from(n), f64::from(n) / 9_999.0)).collect();
        let thin = thinned(&points);
        assert_eq!((thin.len(), thin[0], thin[POINTS - 1]), (POINTS, points[0], points[9_999]));
    }

    #[test]
    fn a_distribution_is_a_staircase() {
        let curve = Curve {
            name: "a".into(),
            points: vec![(1.0, 0.5), (2.0, 1.0)],
            ink: Ink::Series(0),
            dots: false,
        };
        assert_eq!(stepped(&curve).points, [(1.0, 0.0), (1.0, 0.5), (2.0, 0.5), (2.0, 1.0)]);
    }
}
