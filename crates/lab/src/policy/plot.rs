//! Refaults over the size of the memory, a line for each policy.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::{Contestant, Knowledge, Refaults, count_of, traces::Trace};

/// Shares of the pages in the plot, in per cent.
pub const SHARES: [usize; 13] = [20, 25, 30, 35, 40, 45, 50, 55, 60, 70, 80, 90, 95];

const WIDTH: u32 = 860;
const HEIGHT: u32 = 420;
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(0x33, 0x33, 0x33);

/// A name without what no file name may have.
pub fn file_name(name: &str) -> String {
    let letter = |letter: char| {
        if letter.is_ascii_alphanumeric() || letter == '.' {
            letter
        } else {
            '-'
        }
    };
    name.chars().map(letter).collect()
}

/// The plot as SVG.
pub fn draw(trace: &Trace, policies: &[&'static Contestant], found: &[Refaults]) -> Result<String> {
    let mut svg = String::new();
    draw_to(&mut svg, trace, policies, found)
        .map_err(|error| anyhow!("plot of {}: {error}", trace.name))?;
    Ok(svg)
}

fn draw_to(
    svg: &mut String,
    trace: &Trace,
    policies: &[&'static Contestant],
    found: &[Refaults],
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::with_string(svg, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!("{}: refaults by memory, {} pages", trace.name, trace.pages);
    let highest = found.iter().map(|one| one.count).max().unwrap_or(0).max(1);
    let (first, last) = (SHARES[0], SHARES[SHARES.len() - 1]);
    let mut chart = ChartBuilder::on(&root)
        .margin(8)
        .caption(&title, (FONT, 17).into_font().color(&INK))
        .x_label_area_size(40)
        .y_label_area_size(80)
        .build_cartesian_2d(first as f64..last as f64, 0.0..highest as f64 * 1.05)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("memory, % of the pages")
        .y_desc("refaults")
        .label_style((FONT, 12).into_font().color(&INK))
        .draw()?;
    for (index, policy) in policies.iter().enumerate() {
        let point = |share: &usize| {
            let count = count_of(found, policy.name, *share)?;
            Some((*share as f64, count as f64))
        };
        let points = SHARES.iter().filter_map(point);
        let style = style(policy, index);
        let line = LineSeries::new(points, style);
        chart
            .draw_series(line)?
            .label(policy.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .border_style(INK)
        .background_style(WHITE.mix(0.8))
        .label_font((FONT, 11).into_font().color(&INK))
        .draw()?;
    root.present()?;
    Ok(())
}

/// The optimum is black, memfold's lists are thick, and what knows faults only is orange to red; the others
/// are blue to green.
fn style(policy: &Contestant, index: usize) -> ShapeStyle {
    let step = index as f64 * 0.618 % 1.0;
    let colour = match (policy.name, policy.knowledge) {
        ("two-lists", _) => HSLColor(0.07, 0.98, 0.43),
        (_, Knowledge::Future) => HSLColor(0.0, 0.0, 0.0),
        (_, Knowledge::Faults) => HSLColor(0.02 + 0.12 * step, 0.6, 0.65),
        (_, Knowledge::Accesses) => HSLColor(0.35 + 0.4 * step, 0.55, 0.5),
    };
    let width = match policy.name {
        "two-lists" | "optimum" => 3,
        _ => 1,
    };
    colour.stroke_width(width)
}
