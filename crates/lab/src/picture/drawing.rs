//! Two panels beside each other as SVG, for light and for dark pages.

use anyhow::{Result, anyhow};
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::sample::{Sample, Series};

const WIDTH: u32 = 860;
const HEIGHT: u32 = 330;
const FONT: &str = "sans-serif";

/// Colours as plotters writes them, and what each becomes where the reader prefers dark pages.
const PAPER: Shade = Shade(RGBColor(0xff, 0xff, 0xff), "#0d1117");
const INK: Shade = Shade(RGBColor(0x33, 0x33, 0x33), "#d6dbe1");
const GRID: Shade = Shade(RGBColor(0xe6, 0xe6, 0xe6), "#2a3038");
const RESIDENT: Shade = Shade(RGBColor(0x2f, 0x6d, 0xb3), "#4c8fd6");
const POOL: Shade = Shade(RGBColor(0xd9, 0x5f, 0x02), "#e8863a");
const LIMIT: Shade = Shade(RGBColor(0xb0, 0x18, 0x2b), "#ff7b86");

/// A colour, and the one that takes its place on dark pages.
struct Shade(RGBColor, &'static str);

impl Shade {
    fn light(&self) -> String {
        let RGBColor(red, green, blue) = self.0;
        format!("#{red:02X}{green:02X}{blue:02X}")
    }

    /// Presentation attributes give way to a style sheet.
    fn rule(&self) -> String {
        let (light, dark) = (self.light(), self.1);
        format!("[fill=\"{light}\"]{{fill:{dark}}}[stroke=\"{light}\"]{{stroke:{dark}}}")
    }
}

/// One run.
pub struct Panel {
    pub title: String,
    pub series: Series,
}

/// The runs that are compared, on the same scales.
pub struct Picture {
    /// The text alternative.
    pub description: String,
    pub panels: [Panel; 2],
}

impl Picture {
    /// A line for each panel.
    pub fn summary(&self) -> String {
        let line = |panel: &Panel| {
            let (peak, seconds) = (panel.series.peak(), panel.series.seconds);
            format!("{}: at most {peak:.0} MiB, {seconds:.2} s\n", panel.title)
        };
        self.panels.iter().map(line).collect()
    }

    pub fn to_svg(&self) -> Result<String> {
        let mut svg = String::new();
        self.draw(&mut svg)
            .map_err(|error| anyhow!("the picture: {error}"))?;
        let rules = [PAPER, INK, GRID, RESIDENT, POOL, LIMIT];
        let rules: String = rules.iter().map(Shade::rule).collect();
        let head = format!(
            "<title>Memory over time</title><desc>{}</desc>\
             <style>@media (prefers-color-scheme:dark){{{rules}}}</style>",
            escaped(&self.description)
        );
        let (start, rest) = svg
            .split_once(">\n")
            .ok_or_else(|| anyhow!("plotters wrote no SVG"))?;
        Ok(format!("{start} role=\"img\">\n{head}\n{rest}"))
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(svg, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&PAPER.0)?;
        let of_all = |figure: fn(&Series) -> f64| {
            let figures = self.panels.iter().map(|panel| figure(&panel.series));
            figures.fold(0.0, f64::max)
        };
        let (highest, longest) = (of_all(Series::peak) * 1.15, of_all(|series| series.seconds));
        for (panel, area) in self.panels.iter().zip(root.split_evenly((1, 2))) {
            panel.draw(&area, longest * 1.02, highest)?;
        }
        root.present()?;
        Ok(())
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

impl Panel {
    fn draw(
        &self,
        area: &Area<'_>,
        longest: f64,
        highest: f64,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let text = |size: i32, shade: &Shade| (FONT, size).into_font().color(&shade.0);
        let mut chart = ChartBuilder::on(area)
            .margin(8)
            .margin_right(16)
            .caption(&self.title, text(16, &INK))
            .x_label_area_size(34)
            .y_label_area_size(54)
            .build_cartesian_2d(0.0..longest, 0.0..highest)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .max_light_lines(1)
            .light_line_style(PAPER.0)
            .bold_line_style(GRID.0)
            .axis_style(INK.0)
            .x_labels(6)
            .y_labels(6)
            .x_desc("seconds")
            .y_desc("MiB")
            .label_style(text(12, &INK))
            .x_label_formatter(&|seconds| format!("{}", (seconds * 10.0).round() / 10.0))
            .y_label_formatter(&|mib| format!("{mib:.0}"))
            .draw()?;
        let samples = &self.series.samples;
        let total = samples
            .iter()
            .map(|sample| (sample.seconds, sample.resident + sample.pool));
        let resident = samples
            .iter()
            .map(|sample| (sample.seconds, sample.resident));
        if samples.iter().any(|sample| sample.pool > 0.0) {
            chart.draw_series(AreaSeries::new(total, 0.0, POOL.0))?;
        }
        chart.draw_series(AreaSeries::new(resident, 0.0, RESIDENT.0))?;
        if let Some(limit) = self.series.limit_mib {
            let ends = [(0.0, limit), (longest, limit)];
            let line = LIMIT.0.stroke_width(2);
            chart.draw_series(DashedLineSeries::new(ends, 7, 5, line))?;
        }
        self.label(&chart, area, (longest, highest))
    }

    /// Names the areas where they are, instead of in a legend.
    fn label(
        &self,
        chart: &Chart<'_, '_>,
        area: &Area<'_>,
        (longest, highest): (f64, f64),
    ) -> Result<(), Box<dyn std::error::Error>> {
        let series = &self.series;
        let (left, top) = area.get_base_pixel();
        let write = |words: &str, shade: &Shade, across: HPos, at: (f64, f64)| {
            let (x, y) = chart.backend_coord(&at);
            let style = (FONT, 14).into_font().color(&shade.0);
            let style = style.pos(Pos::new(across, VPos::Center));
            area.draw_text(words, &style, (x - left, y - top))
        };
        let at = series.seconds / 2.0;
        let under_label = |sample: &&Sample| (sample.seconds - at).abs() < longest / 6.0;
        let (mut least, mut most, mut total) = (f64::MAX, 0.0_f64, f64::MAX);
        for sample in series.samples.iter().filter(under_label) {
            least = least.min(sample.resident);
            most = most.max(sample.resident);
            total = total.min(sample.resident + sample.pool);
        }
        write("program, resident", &PAPER, HPos::Center, (at, least / 2.0))?;
        if total - most > highest / 12.0 {
            let height = f64::midpoint(most, total);
            write("compressed pool", &PAPER, HPos::Center, (at, height))?;
        }
        let end = longest * 0.98;
        if let Some(limit) = series.limit_mib {
            let height = limit + highest * 0.04;
            let words = format!("limit {limit:.0} MiB");
            write(&words, &LIMIT, HPos::Right, (end, height))?;
        }
        let words = format!("peak {:.0} MiB, {:.1} s", series.peak(), series.seconds);
        write(&words, &INK, HPos::Right, (end, highest * 0.95))?;
        Ok(())
    }
}

type Chart<'a, 'b> = ChartContext<
    'a,
    SVGBackend<'b>,
    Cartesian2d<plotters::coord::types::RangedCoordf64, plotters::coord::types::RangedCoordf64>,
>;

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(pool: f64, limit_mib: Option<f64>) -> Panel {
        let samples = (0..10).map(|step| Sample {
            seconds: f64::from(step) / 10.0,
            resident: 90.0,
            pool,
        });
        Panel {
            title: "sort".to_owned(),
            series: Series {
                samples: samples.collect(),
                seconds: 1.0,
                limit_mib,
            },
        }
    }

    #[test]
    fn each_colour_has_one_for_dark_pages() {
        let picture = Picture {
            description: "a < b".to_owned(),
            panels: [panel(0.0, None), panel(30.0, Some(128.0))],
        };
        let svg = picture.to_svg().unwrap();
        assert!(svg.contains("<desc>a &lt; b</desc>"), "{svg}");
        for attribute in ["fill=\"#", "stroke=\"#"] {
            for part in svg.split(attribute).skip(1) {
                let rule = format!("[{attribute}{}\"]", &part[..6]);
                assert!(svg.contains(&rule), "{rule}");
            }
        }
        assert!(svg.contains("limit 128 MiB") && svg.contains("peak 120 MiB"));
    }
}
