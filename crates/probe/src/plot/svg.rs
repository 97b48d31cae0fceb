//! Renders a scene as SVG. Colours are CSS variables, defined by the page, or by [`STYLE`] in a standalone file.

use std::fmt::Write;

use super::scene::{Anchor, Dash, Ink, Item, PAD, Scene, TEXT};

/// Colours for light and dark. The series have the colours of Okabe and Ito, which colour-blind people can distinguish.
/// On white, the last three are darker, because thin lines in the original colours would be too faint (below 3 : 1).
pub const STYLE: &str = "\
:root{--paper:#fff;--ink:#1b1f24;--muted:#57606a;--grid:#e4e7eb;--s0:#0072b2;--s1:#d55e00;--s2:#009e73;\
--s3:#b04f88;--s4:#b37a00;--s5:#3f98d4;--p0:#6e7781;--p1:#8a6d3b}\
@media (prefers-color-scheme:dark){:root{--paper:#0f1419;--ink:#e6e9ed;--muted:#9aa4af;--grid:#2a323b;\
--s0:#56b4e9;--s1:#f0883e;--s2:#2fc08f;--s3:#e39bc4;--s4:#f0b840;--s5:#8fd0f5;--p0:#a3adb8;--p1:#c9a66b}}\
@media print{:root{--paper:#fff;--ink:#000;--muted:#444;--grid:#ddd;--s0:#0072b2;--s1:#d55e00;--s2:#009e73;\
--s3:#b04f88;--s4:#b37a00;--s5:#3f98d4;--p0:#666;--p1:#8a6d3b}}";

/// Returns SVG to embed in a page.
pub fn svg(scene: &Scene) -> String {
    padded(scene, 0.0)
}

fn padded(scene: &Scene, pad: f32) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"{} {} {} {}\" role=\"img\" aria-label=\"{}\" \
         font-family=\"system-ui,sans-serif\" font-size=\"{TEXT}\">",
        -pad,
        -pad,
        scene.width + 2.0 * pad,
        scene.height + 2.0 * pad,
        escape(&scene.title)
    );
    scene.items.iter().for_each(|item| write_item(&mut out, item));
    out + "</svg>"
}

/// Returns a standalone SVG file. Without a size of its own, a page of Markdown would draw it as wide as the page.
pub fn standalone(scene: &Scene) -> String {
    let [width, height] = [scene.width, scene.height].map(|inner| inner + 2.0 * PAD);
    let inner =
        padded(scene, PAD).replacen("<svg ", &format!("<svg width=\"{width}\" height=\"{height}\" "), 1);
    let paper =
        format!("<rect x=\"-{PAD}\" y=\"-{PAD}\" width=\"100%\" height=\"100%\" fill=\"var(--paper)\"/>");
    inner.replacen('>', &format!("><style>{STYLE}</style>{paper}"), 1)
}

fn write_item(out: &mut String, item: &Item) {
    // Writing to a String cannot fail.
    let _ = match item {
        Item::Line { points, ink, width, dash } => {
            let mut path = String::new();
            for (index, (x, y)) in points.iter().enumerate() {
                let _ = write!(path, "{}{x:.1} {y:.1}", if index == 0 { "M" } else { "L" });
            }
            let dash = match dash {
                Dash::Solid => String::new(),
                Dash::Dashed(lengths) => {
                    let lengths: Vec<String> = lengths.iter().map(f32::to_string).collect();
                    format!(" stroke-dasharray=\"{}\"", lengths.join(" "))
                }
            };
            write!(
                out,
                "<path d=\"{path}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{width}\"{dash} \
                 stroke-linejoin=\"round\"/>",
                colour(*ink)
            )
        }
        Item::Box { at: [x, y, width, height], ink, title } => write!(
            out,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"2\" fill=\"{}\">\
             <title>{}</title></rect>",
            colour(*ink),
            escape(title)
        ),
        Item::Dot { at, ink } => {
            write!(out, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.2\" fill=\"{}\"/>", at.0, at.1, colour(*ink))
        }
        Item::Text { at, anchor, ink, text } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            write!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" fill=\"{}\">{}</text>",
                at.0,
                at.1,
                colour(*ink),
                escape(text)
            )
        }
    };
}

fn colour(ink: Ink) -> String {
    match ink {
        Ink::Text => "var(--ink)".into(),
        Ink::Muted => "var(--muted)".into(),
        Ink::Grid => "var(--grid)".into(),
        Ink::Series(index) => format!("var(--s{})", index % 6),
        Ink::Published(index) => format!("var(--p{})", index % 2),
    }
}

/// Escapes text for markup.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            // Control characters are not valid in markup.
            other if other.is_control() => escaped.push(' '),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_text_and_never_markup() {
        let mut scene = Scene::new(10.0, 10.0, "<script>\"");
        scene.text((1.0, 1.0), Anchor::Start, Ink::Text, "a<b>&\u{7}");
        let svg = svg(&scene);
        assert!(!svg.contains("<script") && svg.contains("a&lt;b&gt;&amp; "), "{svg}");
    }

    #[test]
    fn a_file_has_a_size_of_its_own_and_a_picture_in_a_page_that_of_the_page() {
        let scene = Scene::new(10.0, 20.0, "t");
        assert!(standalone(&scene).starts_with("<svg width=\"26\" height=\"36\" xmlns="));
        assert!(svg(&scene).starts_with("<svg xmlns="));
    }
}
