//! What a long run says meanwhile, on standard error.

use indicatif::{ProgressBar, ProgressStyle};

use super::{case::Case, contestant::Contestant, metric::METRICS, workload::Figures};

/// A bar on a terminal, a line a run elsewhere.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    pub fn new(runs: usize) -> Self {
        let bar = ProgressBar::new(runs as u64);
        if let Ok(style) =
            ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} (left {eta}) {msg}")
        {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// A run has ended.
    pub fn done(
        &self,
        case: &Case,
        contestant: &Contestant,
        round: usize,
        rounds: usize,
        figures: &Figures,
    ) {
        let felt = METRICS.iter().filter(|metric| !metric.cost);
        let first = felt
            .filter_map(|metric| Some((metric, figures.get(metric.name)?)))
            .next();
        let figure = first.map_or(String::new(), |(metric, value)| {
            format!("{value:.4} {}", metric.unit)
        });
        let processes = match case.processes {
            1 => String::new(),
            count => format!(" × {count}"),
        };
        let data = case.data.map_or(String::new(), |data| format!(" ({data})"));
        let line = format!(
            "{}{processes}{data} under {contestant}, round {round}/{rounds}: {figure}",
            case.workload
        );
        self.tell(&line);
        self.step();
    }

    /// Says how far it is.
    pub fn tell(&self, line: &str) {
        if self.0.is_hidden() {
            eprintln!("{line}");
        } else {
            self.0.set_message(line.to_owned());
        }
    }

    /// One of the runs, or steps of one, is done.
    pub fn step(&self) {
        self.0.inc(1);
    }

    /// So many runs will not take place.
    pub fn left_out(&self, runs: usize) {
        self.0.inc(runs as u64);
    }

    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}
