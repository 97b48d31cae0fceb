//! Axes: the positions of values and ticks.

use super::scene::{Anchor, Dash, Ink, Scene, TEXT, text_width};

/// Maps the values of one direction to positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Axis {
    from: f64,
    to: f64,
    start: f32,
    end: f32,
    log: bool,
}

impl Axis {
    /// Creates a linear axis from 0 to `most`.
    pub fn linear(most: f64, start: f32, end: f32) -> Self {
        Self { from: 0.0, to: if most > 0.0 { most } else { 1.0 }, start, end, log: false }
    }

    /// Creates an axis between two positive values; logarithmic if they are far apart.
    pub fn spanning(least: f64, most: f64, start: f32, end: f32) -> Self {
        if least > 0.0 && most / least > 8.0 {
            Self { from: least / 1.1, to: most * 1.1, start, end, log: true }
        } else {
            Self::linear(most * 1.03, start, end)
        }
    }

    /// Returns whether the axis is logarithmic.
    pub fn is_logarithmic(&self) -> bool {
        self.log
    }

    /// Returns the position of a value, clamped to the axis's ends.
    pub fn at(&self, value: f64) -> f32 {
        let part = if self.log {
            (value.max(self.from) / self.from).ln() / (self.to / self.from).ln()
        } else {
            (value - self.from) / (self.to - self.from)
        };
        self.start + (self.end - self.start) * part.clamp(0.0, 1.0) as f32
    }

    /// Returns round values on the axis.
    pub fn ticks(&self) -> Vec<f64> {
        if self.log {
            let first = self.from.log10().floor() as i32;
            let last = self.to.log10().ceil() as i32;
            let steps = (first..=last).flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(power)));
            return steps.filter(|value| (self.from..=self.to).contains(value)).collect();
        }
        let rough = (self.to - self.from) / 5.0;
        let power = 10f64.powf(rough.log10().floor());
        let step =
            [1.0, 2.0, 2.5, 5.0, 10.0].map(|step| step * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        (0..=((self.to - self.from) / step) as usize).map(|index| self.from + index as f64 * step).collect()
    }
}

/// Returns a number with no more digits than it needs.
pub fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Draws the area of a plot with its grid, ticks and axis names.
pub fn frame(scene: &mut Scene, x: &Axis, y: &Axis, names: (&str, &str), percent: bool) {
    let (bottom, top, left, right) = (y.start, y.end, x.start, x.end);
    for value in y.ticks() {
        let at = y.at(value);
        scene.line(vec![(left, at), (right, at)], Ink::Grid, 1.0, Dash::Solid);
        let text = if percent { format!("{:.0} %", value * 100.0) } else { number(value) };
        scene.text((left - 6.0, at + TEXT * 0.35), Anchor::End, Ink::Muted, text);
    }
    let mut free = f32::NEG_INFINITY;
    for value in x.ticks() {
        let (at, text) = (x.at(value), number(value));
        scene.line(vec![(at, bottom), (at, top)], Ink::Grid, 1.0, Dash::Solid);
        // Omits a number that would touch the one before it, but draws its line.
        let half = text_width(&text) / 2.0;
        if at - half > free {
            free = at + half + TEXT * 0.4;
            scene.text_within((at, bottom + TEXT * 1.4), Ink::Muted, text);
        }
    }
    scene.line(vec![(left, top), (left, bottom), (right, bottom)], Ink::Text, 1.0, Dash::Solid);
    scene.text((left, top - TEXT * 0.7), Anchor::Start, Ink::Text, names.1);
    scene.text((right, bottom + TEXT * 2.8), Anchor::End, Ink::Text, names.0);
}

#[cfg(test)]
mod tests {
    use super::super::scene::Item;
    use super::*;

    #[test]
    fn numbers_do_not_touch_and_stay_inside() {
        let mut scene = Scene::new(200.0, 100.0, "t");
        let (x, y) = (Axis::spanning(900.0, 90_000.0, 40.0, 196.0), Axis::linear(1.0, 80.0, 10.0));
        frame(&mut scene, &x, &y, ("ms", "part"), true);
        let span = |item: &Item| match item {
            Item::Text { at, anchor: Anchor::Middle, text, .. } => {
                Some((at.0 - text_width(text) / 2.0, at.0 + text_width(text) / 2.0))
            }
            _ => None,
        };
        let spans: Vec<(f32, f32)> = scene.items.iter().filter_map(span).collect();
        assert!(spans.len() >= 3 && spans.len() < x.ticks().len(), "{spans:?}");
        assert!(spans.windows(2).all(|pair| pair[0].1 < pair[1].0), "{spans:?}");
        assert!(spans.iter().all(|span| span.1 <= 200.0), "{spans:?}");
    }

    #[test]
    fn ticks_are_round_and_inside() {
        for axis in [
            Axis::linear(873.0, 0.0, 100.0),
            Axis::spanning(90.0, 3400.0, 0.0, 100.0),
            Axis::linear(0.0, 0.0, 9.0),
        ] {
            let ticks = axis.ticks();
            assert!((3..=12).contains(&ticks.len()), "{ticks:?}");
            assert!(ticks.windows(2).all(|pair| axis.at(pair[0]) < axis.at(pair[1])), "{ticks:?}");
        }
        assert_eq!(Axis::linear(100.0, 0.0, 200.0).at(50.0), 100.0);
        assert_eq!((number(2.50), number(300.0)), ("2.5".into(), "300".into()));
    }
}
