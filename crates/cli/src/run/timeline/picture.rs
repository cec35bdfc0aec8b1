//! The picture, as SVG whose colours follow the reader's light or dark scheme.
//!
//! Written here: the SVG of `plotters` has its colours in each element, where a media query cannot
//! change them, and it places text by the fonts of the host that draws.

use super::About;
use super::samples::{Sample, Samples, Span};
use super::scale::{Scale, time_label, time_ticks};
use crate::format::{bytes, grouped, nanoseconds};
use crate::messages::Warning;

/// Width of the picture, and of what lies beside the panels.
const WIDTH: f64 = 960.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 16.0;
/// Rows of programs; the longest are drawn.
const MOST_ROWS: usize = 16;
const ROW: f64 = 18.0;
/// Lines of warnings below the picture.
const MOST_WARNINGS: usize = 8;

/// A text for XML and HTML, in content and in attributes. What is no character of XML becomes U+FFFD.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            '\u{200e}'
            | '\u{200f}'
            | '\u{61c}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// The colours, as variables of what `root` selects.
pub fn style(root: &str) -> String {
    format!(
        "{root} {{ --paper: #ffffff; --ink: #1c2024; --soft: #5b636b; --rule: #e3e6e9; \
         --resident: #2a6fc9; --pool: #d9762b; --file: #1a8f6a; --remote: #b03a8c; --limit: #c0262d; --p50: #7a5bc7; \
         --p99: #b02a78; }}\n\
         @media (prefers-color-scheme: dark) {{ {root} {{ --paper: #14171a; --ink: #e8eaed; \
         --soft: #a2abb4; --rule: #2c3238; --resident: #6aa9ff; --pool: #f0a35e; --file: #4fc79d; --remote: #e58ac8; \
         --limit: #ff6b6b; --p50: #b39dff; --p99: #ff7ac0; }} }}"
    )
}

const RULES: &str = "\
text { font: 12px system-ui, sans-serif; fill: var(--ink); } .soft { fill: var(--soft); }
.head { font-weight: 600; font-size: 13px; } .end { text-anchor: end; } .mid { text-anchor: middle; }
.rule { stroke: var(--rule); stroke-width: 1; fill: none; }
.area { stroke: none; fill-opacity: .75; } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.limit { stroke: var(--limit); stroke-width: 1.6; stroke-dasharray: 6 4; fill: none; }
.warning { stroke: var(--limit); stroke-width: 1; stroke-dasharray: 2 3; } .number { fill: var(--limit); }
";

/// Collects elements from top to bottom.
struct Canvas<'a> {
    out: String,
    /// Where the next panel begins.
    y: f64,
    samples: &'a Samples,
    warnings: &'a [Warning],
    /// Seconds.
    end: f64,
}

/// One colour and its name.
type Key<'a> = (&'a str, &'a str);

impl Canvas<'_> {
    fn x(&self, seconds: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (seconds / self.end).clamp(0.0, 1.0)
    }

    fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        self.out.push_str(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>\n",
            escape(text)
        ));
    }

    /// The title of a panel with its keys, and the lines of its axes. Returns the panel's top.
    fn panel(
        &mut self,
        title: &str,
        keys: &[Key<'_>],
        height: f64,
        labels: &[(f64, String)],
    ) -> f64 {
        self.text(LEFT, self.y + 14.0, "head", title);
        let mut x = LEFT + 24.0 + 7.8 * title.chars().count() as f64;
        for (colour, name) in keys {
            let y = self.y + 5.0;
            self.out.push_str(&format!(
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"10\" height=\"10\" rx=\"2\" \
                 fill=\"var(--{colour})\"/>\n"
            ));
            self.text(x + 14.0, self.y + 14.0, "soft", name);
            x += 30.0 + 6.8 * name.chars().count() as f64;
        }
        let top = self.y + 24.0;
        for (place, label) in labels {
            let y = top + height * (1.0 - place);
            self.out.push_str(&format!(
                "<path class=\"rule\" d=\"M{LEFT} {y:.1}H{:.1}\"/>\n",
                WIDTH - RIGHT
            ));
            self.text(LEFT - 8.0, y + 4.0, "soft end", label);
        }
        for number in 0..self.warnings.len() {
            let x = self.x(self.warnings[number].at.as_secs_f64());
            self.out.push_str(&format!(
                "<path class=\"warning\" d=\"M{x:.1} {top:.1}v{height:.1}\"/>\n"
            ));
        }
        self.y = top + height + 18.0;
        top
    }

    /// The points of a number over time, each as `x y`.
    fn points(
        &self,
        top: f64,
        height: f64,
        scale: Scale,
        of: impl Fn(&Sample) -> f64,
    ) -> Vec<String> {
        let samples = self.samples.all().iter();
        let point = |sample: &Sample| {
            let y = top + height * (1.0 - scale.place(of(sample)));
            format!("{:.1} {y:.1}", self.x(sample.at.as_secs_f64()))
        };
        samples.map(point).collect()
    }

    fn area(&mut self, colour: &str, upper: &[String], lower: &[String]) {
        if upper.is_empty() {
            return;
        }
        let back: Vec<&str> = lower.iter().rev().map(String::as_str).collect();
        self.out.push_str(&format!(
            "<path class=\"area\" fill=\"var(--{colour})\" d=\"M{}L{}Z\"/>\n",
            upper.join("L"),
            back.join("L")
        ));
    }

    fn line(&mut self, colour: &str, points: &[String]) {
        if points.is_empty() {
            return;
        }
        self.out.push_str(&format!(
            "<path class=\"line\" stroke=\"var(--{colour})\" d=\"M{}\"/>\n",
            points.join("L")
        ));
    }

    fn memory(&mut self) {
        const HEIGHT: f64 = 200.0;
        let all = self.samples.all();
        let limit = |sample: &Sample| match sample.limit {
            0 => sample.resident_limit,
            limit => limit,
        };
        let total = |sample: &Sample| sample.resident + sample.pool;
        let most = all.iter().map(|sample| {
            let out = sample.file.max(sample.remote);
            total(sample).max(limit(sample)).max(out)
        });
        let scale = Scale::up_to(most.max().unwrap_or(0) as f64);
        let ticks = scale.ticks(5.0, true);
        let labels: Vec<_> = ticks
            .into_iter()
            .map(|tick| (scale.place(tick), bytes(tick as u64)))
            .collect();
        let last = all.last().copied().unwrap_or_default();
        let file: fn(&Sample) -> u64 = |sample| sample.file;
        let remote: fn(&Sample) -> u64 = |sample| sample.remote;
        let mut outside = vec![("file", "swap file", file), ("remote", "remote", remote)];
        outside.retain(|(.., of)| all.iter().any(|sample| of(sample) > 0));
        let what = if last.limit == 0 {
            " on resident memory"
        } else {
            ""
        };
        let limit_name = format!("limit{what} {}", bytes(limit(&last)));
        let mut keys = vec![("resident", "resident"), ("pool", "pool and metadata")];
        keys.extend(outside.iter().map(|(colour, name, _)| (*colour, *name)));
        keys.push(("limit", limit_name.as_str()));
        let top = self.panel("Memory", &keys, HEIGHT, &labels);
        let floor = self.points(top, HEIGHT, scale, |_| 0.0);
        let resident = self.points(top, HEIGHT, scale, |sample| sample.resident as f64);
        let both = self.points(top, HEIGHT, scale, |sample| total(sample) as f64);
        self.area("resident", &resident, &floor);
        self.area("pool", &both, &resident);
        for (colour, _, of) in outside {
            let points = self.points(top, HEIGHT, scale, |sample| of(sample) as f64);
            self.line(colour, &points);
        }
        let points = self.points(top, HEIGHT, scale, |sample| limit(sample) as f64);
        if !points.is_empty() {
            self.out.push_str(&format!(
                "<path class=\"limit\" d=\"M{}\"/>\n",
                points.join("L")
            ));
        }
        for (number, warning) in self.warnings.iter().enumerate().take(MOST_WARNINGS) {
            let x = self.x(warning.at.as_secs_f64());
            self.text(x + 3.0, top + 10.0, "number", &(number + 1).to_string());
        }
    }

    fn faults(&mut self) {
        const HEIGHT: f64 = 90.0;
        let all = self.samples.all();
        let mut rates = Vec::with_capacity(all.len());
        let mut before = 0.0;
        for sample in all {
            let at = sample.at.as_secs_f64();
            rates.push((at, sample.faults as f64 / (at - before).max(1e-3)));
            before = at;
        }
        let scale = Scale::up_to(rates.iter().map(|(_, rate)| *rate).fold(10.0, f64::max));
        let labels: Vec<_> = scale
            .ticks(3.0, false)
            .into_iter()
            .map(|tick| (scale.place(tick), grouped(tick as u64)))
            .collect();
        let top = self.panel("Faults a second", &[], HEIGHT, &labels);
        let place = |(at, rate): &(f64, f64)| {
            format!(
                "{:.1} {:.1}",
                self.x(*at),
                top + HEIGHT * (1.0 - scale.place(*rate))
            )
        };
        let points: Vec<String> = rates.iter().map(place).collect();
        let floor = self.points(top, HEIGHT, scale, |_| 0.0);
        self.area("resident", &points, &floor);
    }

    fn latency(&mut self) {
        const HEIGHT: f64 = 90.0;
        let all = self.samples.all();
        let scale = Scale::around(all.iter().flat_map(|s| [s.p50 as f64, s.p99 as f64]));
        let labels: Vec<_> = scale
            .ticks(4.0, false)
            .into_iter()
            .map(|tick| (scale.place(tick), nanoseconds(tick as u64)))
            .collect();
        let keys = [("p50", "median"), ("p99", "99th percentile")];
        let top = self.panel("Latency of faults", &keys, HEIGHT, &labels);
        for (colour, of) in [
            ("p50", (|s| s.p50) as fn(&Sample) -> u64),
            ("p99", |s| s.p99),
        ] {
            // Times without faults are gaps.
            let runs = all.split(|sample| sample.faults == 0);
            let path: String = runs
                .filter(|run| !run.is_empty())
                .map(|run| {
                    let place = |sample: &Sample| {
                        let y = top + HEIGHT * (1.0 - scale.place(of(sample) as f64));
                        format!("{:.1} {y:.1}", self.x(sample.at.as_secs_f64()))
                    };
                    let points: Vec<String> = run.iter().map(place).collect();
                    // A single point is drawn as a dot.
                    let dot = if points.len() == 1 { "h1" } else { "" };
                    format!("M{}{dot}", points.join("L"))
                })
                .collect();
            if !path.is_empty() {
                self.out.push_str(&format!(
                    "<path class=\"line\" stroke=\"var(--{colour})\" d=\"{path}\"/>\n"
                ));
            }
        }
    }

    fn programs(&mut self) {
        let programs = &self.samples.programs;
        let mut spans: Vec<&Span> = programs.spans().iter().collect();
        spans.sort_by_key(|span| std::cmp::Reverse(span.until.saturating_sub(span.from)));
        spans.truncate(MOST_ROWS);
        spans.sort_by_key(|span| (span.from, span.pid));
        let more = programs.count() - spans.len() as u64;
        let title = match more {
            0 => "Programs".to_owned(),
            _ => format!(
                "Programs: the {} longest of {}",
                spans.len(),
                programs.count()
            ),
        };
        let height = ROW * spans.len().max(1) as f64;
        let top = self.panel(&title, &[], height, &[]);
        for (row, span) in spans.into_iter().enumerate() {
            let y = top + ROW * row as f64;
            let (from, until) = (
                self.x(span.from.as_secs_f64()),
                self.x(span.until.as_secs_f64()),
            );
            let name: String = span.name.chars().take(16).collect();
            self.out.push_str(&format!(
                "<rect x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"12\" rx=\"2\" \
                 fill=\"var(--resident)\" fill-opacity=\".35\"/>\n",
                y + 2.0,
                (until - from).max(2.0)
            ));
            let name = if name.is_empty() { "?" } else { &name };
            let label = format!("{name} ({})", span.pid);
            // Beside the end of the bar where it begins too far to the right.
            if from > WIDTH * 0.75 {
                self.text(from - 5.0, y + 12.0, "end", &label);
            } else {
                self.text(from + 5.0, y + 12.0, "", &label);
            }
        }
    }

    fn times(&mut self) {
        for tick in time_ticks(self.end, 8.0) {
            let x = self.x(tick);
            self.out.push_str(&format!(
                "<path class=\"rule\" d=\"M{x:.1} {:.1}v5\"/>\n",
                self.y - 12.0
            ));
            self.text(x, self.y + 6.0, "soft mid", &time_label(tick));
        }
        self.y += 22.0;
    }

    fn list_warnings(&mut self) {
        for (number, warning) in self.warnings.iter().enumerate().take(MOST_WARNINGS) {
            let at = time_label(warning.at.as_secs_f64());
            let text: String = warning.text.chars().take(120).collect();
            self.text(
                LEFT,
                self.y + 12.0,
                "",
                &format!("{}  {at}: {text}", number + 1),
            );
            self.y += 17.0;
        }
        let more = self.warnings.len().saturating_sub(MOST_WARNINGS);
        if more > 0 {
            self.text(
                LEFT,
                self.y + 12.0,
                "soft",
                &format!("{more} more warnings"),
            );
            self.y += 17.0;
        }
    }
}

/// Draws a run.
pub fn draw(samples: &Samples, warnings: &[Warning], about: &About) -> String {
    let mut canvas = Canvas {
        out: String::new(),
        y: 34.0,
        samples,
        warnings,
        end: samples.end().as_secs_f64().max(1e-3),
    };
    let command: String = about.command.chars().take(110).collect();
    canvas.text(LEFT, 20.0, "head", &command);
    canvas.memory();
    canvas.faults();
    canvas.latency();
    canvas.programs();
    canvas.times();
    canvas.list_warnings();
    let height = canvas.y + 8.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" \
         width=\"{WIDTH:.0}\" height=\"{height:.0}\" role=\"img\" class=\"memfold\">\n\
         <title>memfold: {}</title>\n<style>\n{}\n{RULES}</style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"var(--paper)\"/>\n{}</svg>\n",
        escape(&command),
        style(".memfold"),
        canvas.out
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::timeline::page::html;
    use std::time::Duration;

    fn run(name: &str) -> (Samples, Vec<Warning>, About) {
        let mut samples = Samples::new(Duration::from_millis(50));
        for number in 0..100_u64 {
            samples.push(Sample {
                at: Duration::from_millis(50 * number),
                resident: number << 20,
                pool: number << 18,
                file: number << 16,
                remote: number << 15,
                limit: 100 << 20,
                resident_limit: 80 << 20,
                faults: number % 7,
                p50: 5_000,
                p99: 70_000,
            });
        }
        let warning = Warning {
            at: Duration::from_secs(2),
            text: format!("{name} is not under the limit"),
        };
        let about = About {
            command: name.to_owned(),
            outcome: "status 0".to_owned(),
        };
        (samples, vec![warning], about)
    }

    #[test]
    fn names_are_text_and_never_markup() {
        let name = "</text><script>alert(1)</script><!-- \"'&]]>\u{1b}[2J\u{202e}\u{0}";
        let (samples, warnings, about) = run(name);
        let picture = draw(&samples, &warnings, &about);
        let page = html(&picture, &samples, &warnings, &about);
        for document in [&picture, &page] {
            assert!(
                !document.contains("<script") && !document.contains("<!--"),
                "{document}"
            );
            assert!(!document.contains("]]>") && !document.contains(name));
            assert!(document.contains("&lt;script&gt;alert(1)"));
            assert!(!document.chars().any(|c| c.is_control() && c != '\n'));
            assert!(!document.contains('\u{202e}'));
        }
    }

    #[test]
    fn a_picture_loads_nothing_and_has_both_schemes() {
        let (samples, warnings, about) = run("sort");
        let picture = draw(&samples, &warnings, &about);
        let page = html(&picture, &samples, &warnings, &about);
        for document in [&picture, &page] {
            let links = document.replace("http://www.w3.org/2000/svg", "");
            for loading in [
                "http:", "https:", "src=", "href", "url(", "@import", "NaN", "inf",
            ] {
                assert!(!links.contains(loading), "{loading}");
            }
            assert!(document.contains("prefers-color-scheme: dark"));
            for text in [
                "resident",
                "pool and metadata",
                "swap file",
                ">remote<",
                "limit 100 MiB",
                "Faults a second",
            ] {
                assert!(document.contains(text), "{text}");
            }
        }
        assert!(page.contains("default-src 'none'") && picture.len() < 100_000);
    }

    #[test]
    fn a_run_without_samples_has_a_picture() {
        let samples = Samples::new(Duration::from_millis(50));
        let picture = draw(&samples, &[], &About::default());
        assert!(picture.ends_with("</svg>\n") && !picture.contains("NaN"));
    }
}
