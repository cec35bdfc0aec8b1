//! The page around the picture.

use super::About;
use super::picture::{escape, style};
use super::samples::Samples;
use super::scale::time_label;
use crate::format::{bytes, grouped};
use crate::messages::Warning;

/// One page that loads nothing and runs nothing; its policy forbids both.
pub fn html(picture: &str, samples: &Samples, warnings: &[Warning], about: &About) -> String {
    let peak = |of: fn(&super::samples::Sample) -> u64| samples.all().iter().map(of).max();
    let rows = [
        ("Ended", about.outcome.clone()),
        ("Time", time_label(samples.end().as_secs_f64())),
        (
            "Resident, at most",
            bytes(peak(|s| s.resident).unwrap_or(0)),
        ),
        (
            "Pool and metadata, at most",
            bytes(peak(|s| s.pool).unwrap_or(0)),
        ),
        ("Swap file, at most", bytes(peak(|s| s.file).unwrap_or(0))),
        ("Remote, at most", bytes(peak(|s| s.remote).unwrap_or(0))),
        (
            "Faults served",
            grouped(samples.all().iter().map(|s| s.faults).sum()),
        ),
        ("Programs", grouped(samples.programs.count())),
        ("memfold", env!("CARGO_PKG_VERSION").to_owned()),
        (
            "Samples",
            format!(
                "{} every {:.2} s; {:.3} % of a CPU",
                samples.all().len(),
                samples.distance().as_secs_f64(),
                100.0 * samples.cpu.as_secs_f64() / samples.end().as_secs_f64().max(1e-9)
            ),
        ),
    ];
    let rows: String = rows
        .iter()
        .map(|(name, value)| format!("<tr><th>{name}</th><td>{}</td></tr>\n", escape(value)))
        .collect();
    let warnings: String = warnings
        .iter()
        .enumerate()
        .map(|(number, warning)| {
            format!(
                "<li value=\"{}\">{}</li>\n",
                number + 1,
                escape(&warning.text)
            )
        })
        .collect();
    let warnings = if warnings.is_empty() {
        String::new()
    } else {
        format!("<h2>Warnings</h2>\n<ol>\n{warnings}</ol>\n")
    };
    let command = escape(&about.command);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
         style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>memfold: {command}</title>\n<style>\n{}\n\
         body {{ background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; \
         max-width: 1000px; margin: 24px auto; padding: 0 16px; }}\n\
         h1 {{ font-size: 19px; overflow-wrap: anywhere; }} h2 {{ font-size: 16px; }}\n\
         svg {{ width: 100%; height: auto; }}\n\
         table {{ border-collapse: collapse; }} th {{ text-align: left; font-weight: 400; \
         color: var(--soft); padding-right: 24px; }}\n\
         </style>\n</head>\n<body>\n<h1>{command}</h1>\n{picture}\n{warnings}<table>\n{rows}</table>\n\
         </body>\n</html>\n",
        style(":root")
    )
}
