//! Progress of a long run, on standard error.

use indicatif::{ProgressBar, ProgressStyle};

use super::{backend::Backend, case::Case, metric::METRICS, workload::Figures};

/// A progress bar on a terminal, else one line per run.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Progress over `runs` steps.
    pub fn new(runs: usize) -> Self {
        let bar = ProgressBar::new(runs as u64);
        if let Ok(style) =
            ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} (left {eta}) {msg}")
        {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// Reports a completed run.
    pub fn done(
        &self,
        case: &Case,
        backend: &Backend,
        round: usize,
        rounds: usize,
        figures: &Figures,
    ) {
        let mut performance = METRICS.iter().filter(|metric| !metric.cost);
        let first = performance.find_map(|metric| Some((metric, figures.get(metric.name)?)));
        let figure = first.map_or(String::new(), |(metric, value)| {
            format!("{value:.4} {}", metric.unit)
        });
        let processes = match case.processes {
            1 => String::new(),
            count => format!(" × {count}"),
        };
        let data = case.data.map_or(String::new(), |data| format!(" ({data})"));
        let line = format!(
            "{}{processes}{data} under {backend}, round {round}/{rounds}: {figure}",
            case.workload
        );
        self.message(&line);
        self.step();
    }

    /// Shows a message.
    pub fn message(&self, line: &str) {
        if self.0.is_hidden() {
            eprintln!("{line}");
        } else {
            self.0.set_message(line.to_owned());
        }
    }

    /// Advances by one step.
    pub fn step(&self) {
        self.0.inc(1);
    }

    /// Advances by runs that are skipped.
    pub fn skip(&self, runs: usize) {
        self.0.inc(runs as u64);
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}
