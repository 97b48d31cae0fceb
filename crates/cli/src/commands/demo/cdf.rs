//! A CDF drawn with characters.

/// Numbers of columns and rows of the plot.
const WIDTH: usize = 64;
const HEIGHT: usize = 10;
/// Marks of the curves, in order.
const MARKS: [char; 6] = ['●', '■', '▲', '○', '□', '△'];

/// Draws the fraction of each curve's values (ms) at or below each time, on a logarithmic axis, with a legend below.
/// Omits a curve without values; without any curve, the text is empty.
pub fn draw(curves: &[(&str, Vec<f64>)]) -> String {
    let all = || curves.iter().flat_map(|(_, values)| values.iter().copied()).filter(|value| *value > 0.0);
    let (Some(least), Some(most)) = (all().reduce(f64::min), all().reduce(f64::max)) else {
        return String::new();
    };
    let (low, high) = ((least * 0.9).log10(), (most * 1.1).log10());
    let column = |value: f64| (((value.log10() - low) / (high - low)) * (WIDTH - 1) as f64).round() as usize;

    let mut plane = vec![[' '; WIDTH]; HEIGHT + 1];
    let mut legend = String::new();
    for ((name, values), mark) in curves.iter().zip(MARKS.iter().cycle()) {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|value| *value > 0.0).collect();
        sorted.sort_by(f64::total_cmp);
        if sorted.is_empty() {
            continue;
        }
        for (index, value) in sorted.iter().enumerate() {
            let row = HEIGHT - (index + 1) * HEIGHT / sorted.len();
            plane[row][column(*value).min(WIDTH - 1)] = *mark;
        }
        legend += &format!("{mark} {name}   ");
    }

    let mut text = String::new();
    for (row, cells) in plane.iter().enumerate() {
        let part = (HEIGHT - row) * 100 / HEIGHT;
        let label = if part.is_multiple_of(50) { format!("{part:>4} %") } else { " ".repeat(6) };
        text += format!("{label} │{}", cells.iter().collect::<String>()).trim_end();
        text.push('\n');
    }
    text += &format!("       └{}\n", "─".repeat(WIDTH));
    text += &axis(low, high);
    text + "       " + legend.trim_end()
}

/// Returns the axis's labels: 1, 2 and 5 of each power of ten, where there is space for them.
fn axis(low: f64, high: f64) -> String {
    let mut line = vec![' '; WIDTH + 8];
    let mut free = 0;
    for power in low.floor() as i32..=high.ceil() as i32 {
        for step in [1.0, 2.0, 5.0] {
            let value = step * 10f64.powi(power);
            let place = (value.log10() - low) / (high - low);
            if !(0.0..=1.0).contains(&place) {
                continue;
            }
            let label = if value < 1000.0 { format!("{value} ms") } else { format!("{} s", value / 1000.0) };
            let at = 8 + (place * (WIDTH - 1) as f64) as usize;
            if at < free || at + label.chars().count() > line.len() {
                continue;
            }
            for (offset, letter) in label.chars().enumerate() {
                line[at + offset] = letter;
            }
            free = at + label.chars().count() + 2;
        }
    }
    line.iter().collect::<String>().trim_end().to_owned() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faster_starts_are_left_of_slower_ones_and_the_slowest_is_at_the_top() {
        let drawn = draw(&[("pool", vec![100.0, 110.0]), ("boot", vec![1000.0, 1100.0])]);
        let lines: Vec<Vec<char>> = drawn.lines().map(|line| line.chars().collect()).collect();
        let find = |line: &[char], mark| line.iter().position(|letter| *letter == mark);
        assert!(find(&lines[0], '●').unwrap() < find(&lines[0], '■').unwrap(), "{drawn}");
        assert!(find(&lines[HEIGHT / 2], '●').is_some(), "the first of two is half of them: {drawn}");
        assert!(drawn.contains("● pool   ■ boot"), "{drawn}");
        assert!(drawn.contains("200 ms") && drawn.contains("1 s"), "{drawn}");
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        assert_eq!(draw(&[("pool", vec![])]), "");
        assert!(draw(&[("pool", vec![5.0])]).contains('●'), "one value alone");
    }
}
