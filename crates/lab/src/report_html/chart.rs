//! Bar charts on a logarithmic scale, with a circle for every run.

use anyhow::{Result, anyhow};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// A bar: a median and its runs.
#[derive(Debug, Clone)]
pub struct Bar {
    /// Backend or variant, which selects the colour.
    pub name: String,
    /// The median.
    pub value: f64,
    /// Every run.
    pub runs: Vec<f64>,
}

/// Adjacent bars with a common label.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// Text below the bars.
    pub label: String,
    /// The bars, from left to right.
    pub bars: Vec<Bar>,
}

/// A chart.
#[derive(Debug, Clone)]
pub struct Chart {
    /// File name without extension.
    pub file: &'static str,
    /// Caption.
    pub title: String,
    /// Label of the y axis.
    pub axis: String,
    /// Groups of bars, from left to right.
    pub clusters: Vec<Cluster>,
}

/// Size of a chart in pixels.
const WIDTH: u32 = 860;
const HEIGHT: u32 = 330;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(0x33, 0x33, 0x33);

/// The colour of a backend or variant, the same in all charts.
pub fn colour(name: &str) -> RGBColor {
    match name {
        "native" => RGBColor(0x9a, 0x9a, 0x9a),
        "zram:lz4" | "pool-lock" | "tree" | "sync" | "wall" => RGBColor(0x2f, 0x6d, 0xb3),
        "zram:lzo-rle" | "outside-lock" => RGBColor(0x8f, 0xb8, 0xe0),
        "zswap" | "class-index" => RGBColor(0x57, 0xa7, 0x73),
        "memfold" | "bulk" | "swap-table" | "gather" | "cpu" => RGBColor(0xd9, 0x5f, 0x02),
        "memfold-embedded" | "deferred" => RGBColor(0xf0, 0xa3, 0x4a),
        _ => RGBColor(0x6b, 0x4c, 0x9a),
    }
}

impl Chart {
    /// The chart as SVG.
    pub fn to_svg(&self) -> Result<String> {
        let mut svg = String::new();
        self.draw(&mut svg)
            .map_err(|error| anyhow!("{}: {error}", self.file))?;
        Ok(svg)
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(svg, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&WHITE)?;
        let (lowest, highest) = self.bounds();
        let mut chart = ChartBuilder::on(&root)
            .margin(8)
            .caption(&self.title, (FONT, 17).into_font().color(&INK))
            .x_label_area_size(28)
            .y_label_area_size(64)
            .build_cartesian_2d(
                0.0..self.clusters.len() as f64,
                (lowest..highest).log_scale(),
            )?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .light_line_style(WHITE)
            .bold_line_style(RGBColor(0xe6, 0xe6, 0xe6))
            .y_desc(&self.axis)
            .y_label_style((FONT, 12).into_font().color(&INK))
            .y_label_formatter(&|value| scale_label(*value))
            .draw()?;
        for (place, cluster) in self.clusters.iter().enumerate() {
            let width = 0.8 / cluster.bars.len().max(1) as f64;
            for (index, bar) in cluster.bars.iter().enumerate() {
                let left = place as f64 + 0.1 + width * index as f64;
                let right = left + width * 0.9;
                let fill = colour(&bar.name).filled();
                let shape = Rectangle::new([(left, lowest), (right, bar.value)], fill);
                chart.draw_series([shape])?;
                let middle = f64::midpoint(left, right);
                let dots = bar
                    .runs
                    .iter()
                    .map(|run| Circle::new((middle, *run), 2, INK.stroke_width(1)));
                chart.draw_series(dots)?;
                // The median as text, above the bar and its runs.
                let top = bar.runs.iter().copied().fold(bar.value, f64::max);
                let (x, y) = chart.backend_coord(&(middle, top));
                root.draw_text(&short(bar.value), &text(10, VPos::Bottom), (x, y - 4))?;
            }
            let (x, y) = chart.backend_coord(&(place as f64 + 0.5, lowest));
            root.draw_text(&cluster.label, &text(13, VPos::Top), (x, y + 7))?;
        }
        root.present()?;
        Ok(())
    }

    /// Bounds of the y axis: a power of ten below all values, and 2.5 times the largest.
    fn bounds(&self) -> (f64, f64) {
        let values = || {
            self.clusters
                .iter()
                .flat_map(|cluster| &cluster.bars)
                .flat_map(|bar| bar.runs.iter().copied().chain([bar.value]))
                .filter(|value| *value > 0.0)
        };
        let lowest = values().fold(f64::INFINITY, f64::min);
        let highest = values().fold(0.0, f64::max);
        let down = 10_f64.powf((lowest / 1.5).log10().floor());
        (down, (highest * 2.5).max(down * 10.0))
    }
}

/// A text style centred on a point.
fn text(size: i32, vertical: VPos) -> TextStyle<'static> {
    let place = Pos::new(HPos::Center, vertical);
    (FONT, size).into_font().color(&INK).pos(place)
}

/// A number in few characters, to about three digits.
pub fn short(value: f64) -> String {
    match value.abs() {
        big if big >= 1e6 => format!("{:.3} M", value / 1e6).replace("0 M", " M"),
        big if big >= 10_000.0 => format!("{:.0} k", value / 1e3),
        big if big >= 100.0 => format!("{value:.0}"),
        big if big >= 10.0 => format!("{value:.1}"),
        big if big >= 1.0 => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        small if small >= 0.0001 => {
            let decimals = (2.0 - small.log10().floor()) as usize;
            trimmed(&format!("{value:.decimals$}"))
        }
        _ => format!("{value:.1e}"),
    }
}

/// The label of a line of the logarithmic axis: only 1, 2 and 5 times a power of ten, as more would
/// overlap.
fn scale_label(value: f64) -> String {
    let leading = value / 10_f64.powf(value.log10().floor());
    match leading {
        one if one.fract().abs() > 1e-6 && one.fract() < 1.0 - 1e-6 => String::new(),
        one if [1, 2, 5, 10].contains(&(one.round() as i32)) => short(value),
        _ => String::new(),
    }
}

fn trimmed(text: &str) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_shows_every_bar_and_every_run() {
        let bar = |name: &str, value: f64| Bar {
            name: name.to_owned(),
            value,
            runs: vec![value * 0.9, value, value * 1.1],
        };
        let chart = Chart {
            file: "test",
            title: "munmap".to_owned(),
            axis: "ms".to_owned(),
            clusters: vec![Cluster {
                label: "64 MB".to_owned(),
                bars: vec![bar("zram:lz4", 40.0), bar("memfold", 0.2)],
            }],
        };
        let svg = chart.to_svg().unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("64 MB"));
        assert_eq!(svg.matches("<circle").count(), 6);
        assert!(svg.contains("#D95F02") && svg.contains("#2F6DB3"));
        assert_eq!(chart.bounds(), (0.1, 110.0));
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(short(123_456.0), "123 k");
        assert_eq!(short(0.1234), "0.123");
        assert_eq!(short(0.012_34), "0.0123");
        assert_eq!(short(0.5), "0.5");
        assert_eq!(short(42.42), "42.4");
        assert_eq!(short(0.0), "0");
        assert_eq!(scale_label(200.0), "200");
        assert_eq!(scale_label(0.1), "0.1");
        assert_eq!(scale_label(300.0), "");
    }
}
