//! Renders a scene as PNG: in light colours, two pixels per unit, and with a bitmap font, so that the host needs no
//! font.

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};
use tiny_skia::{
    Color, FillRule, LineCap, LineJoin, Paint, PathBuilder, Pixmap, PremultipliedColorU8, Rect, Stroke,
    StrokeDash, Transform,
};

use super::scene::{Anchor, Dash, Ink, Item, PAD, Scene};

const SCALE: f32 = 2.0;
const FONT: RasterHeight = RasterHeight::Size24;
const WEIGHT: FontWeight = FontWeight::Regular;

/// Returns the bytes of a PNG file; `None` for a scene without area.
pub fn png(scene: &Scene) -> Option<Vec<u8>> {
    if scene.width <= 0.0 || scene.height <= 0.0 {
        return None;
    }
    let side = |length: f32| ((length + 2.0 * PAD) * SCALE).ceil() as u32;
    let mut pixels = Pixmap::new(side(scene.width), side(scene.height))?;
    pixels.fill(Color::WHITE);
    for item in &scene.items {
        draw(&mut pixels, item);
    }
    pixels.encode_png().ok()
}

fn draw(pixels: &mut Pixmap, item: &Item) {
    let scale = Transform::from_scale(SCALE, SCALE).pre_translate(PAD, PAD);
    match item {
        Item::Line { points, ink, width, dash } => {
            let mut path = PathBuilder::new();
            for (index, &(x, y)) in points.iter().enumerate() {
                if index == 0 { path.move_to(x, y) } else { path.line_to(x, y) }
            }
            let dash = match dash {
                Dash::Solid => None,
                Dash::Dashed(lengths) => StrokeDash::new(lengths.to_vec(), 0.0),
            };
            let stroke = Stroke {
                width: *width,
                line_cap: LineCap::Butt,
                line_join: LineJoin::Round,
                dash,
                ..Stroke::default()
            };
            if let Some(path) = path.finish() {
                pixels.stroke_path(&path, &paint(*ink), &stroke, scale, None);
            }
        }
        Item::Box { at: [x, y, width, height], ink, .. } => {
            if let Some(rect) = Rect::from_xywh(*x, *y, *width, *height) {
                pixels.fill_rect(rect, &paint(*ink), scale, None);
            }
        }
        Item::Dot { at, ink } => {
            if let Some(circle) = PathBuilder::from_circle(at.0, at.1, 3.2) {
                pixels.fill_path(&circle, &paint(*ink), FillRule::Winding, scale, None);
            }
        }
        Item::Text { at, anchor, ink, text } => write(pixels, *at, *anchor, *ink, text),
    }
}

fn write(pixels: &mut Pixmap, at: (f32, f32), anchor: Anchor, ink: Ink, text: &str) {
    let advance = get_raster_width(WEIGHT, FONT) as f32;
    let width = advance * text.chars().count() as f32;
    let left = (at.0 + PAD) * SCALE
        - match anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => width / 2.0,
            Anchor::End => width,
        };
    // The font's baseline is four fifths down its box.
    let top = (at.1 + PAD) * SCALE - FONT.val() as f32 * 0.8;
    let [red, green, blue] = rgb(ink);
    for (index, character) in text.chars().enumerate() {
        let glyph = get_raster(plain(character), WEIGHT, FONT).or_else(|| get_raster('?', WEIGHT, FONT));
        let Some(glyph) = glyph else { continue };
        let x = (left + index as f32 * advance).round() as i32;
        for (row, line) in glyph.rows().enumerate() {
            for (column, &cover) in line.iter().enumerate() {
                blend(pixels, x + column as i32, top.round() as i32 + row as i32, [red, green, blue], cover);
            }
        }
    }
}

/// Returns a substitute for a character that the font lacks.
fn plain(character: char) -> char {
    match character {
        '–' | '—' => '-',
        '…' => '~',
        '’' => '\'',
        other => other,
    }
}

fn blend(pixels: &mut Pixmap, x: i32, y: i32, ink: [u8; 3], cover: u8) {
    let (width, height) = (pixels.width() as i32, pixels.height() as i32);
    if cover == 0 || x < 0 || y < 0 || x >= width || y >= height {
        return;
    }
    let pixel = &mut pixels.pixels_mut()[(y * width + x) as usize];
    let mix = |old: u8, new: u8| {
        ((u32::from(old) * (255 - u32::from(cover)) + u32::from(new) * u32::from(cover)) / 255) as u8
    };
    let mixed = [mix(pixel.red(), ink[0]), mix(pixel.green(), ink[1]), mix(pixel.blue(), ink[2])];
    if let Some(mixed) = PremultipliedColorU8::from_rgba(mixed[0], mixed[1], mixed[2], 255) {
        *pixel = mixed;
    }
}

fn paint(ink: Ink) -> Paint<'static> {
    let [red, green, blue] = rgb(ink);
    let mut paint = Paint { anti_alias: true, ..Paint::default() };
    paint.set_color_rgba8(red, green, blue, 255);
    paint
}

/// Returns the light colours of [`super::STYLE`].
fn rgb(ink: Ink) -> [u8; 3] {
    const SERIES: [[u8; 3]; 6] = [
        [0x00, 0x72, 0xb2],
        [0xd5, 0x5e, 0x00],
        [0x00, 0x9e, 0x73],
        [0xb0, 0x4f, 0x88],
        [0xb3, 0x7a, 0x00],
        [0x3f, 0x98, 0xd4],
    ];
    match ink {
        Ink::Text => [0x1b, 0x1f, 0x24],
        Ink::Muted => [0x57, 0x60, 0x6a],
        Ink::Grid => [0xe4, 0xe7, 0xeb],
        Ink::Series(index) => SERIES[index % SERIES.len()],
        Ink::Published(index) => [[0x6e, 0x77, 0x81], [0x8a, 0x6d, 0x3b]][index % 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_lines_leave_ink() {
        let mut scene = Scene::new(60.0, 20.0, "t");
        let empty = png(&scene).unwrap();
        scene.text((2.0, 15.0), Anchor::Start, Ink::Text, "ms…");
        let with_text = png(&scene).unwrap();
        scene.line(vec![(0.0, 2.0), (60.0, 2.0)], Ink::Series(1), 2.0, Dash::Dashed(&[3.0, 2.0]));
        let with_both = png(&scene).unwrap();
        assert!(empty.starts_with(b"\x89PNG"));
        assert!(empty.len() < with_text.len() && with_text.len() < with_both.len());
        assert_eq!(png(&Scene::new(0.0, 0.0, "")), None);
    }
}
