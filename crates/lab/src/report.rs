//! The output of an experiment: a table, or one JSON object.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use crate::output::say;

/// One row: inputs and figures, in the order of insertion.
#[derive(Debug, Clone, Default)]
pub struct Row(Vec<(&'static str, Value)>);

impl Row {
    /// An empty row.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a column.
    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.0.push((name, value.into()));
        self
    }

    /// Adds the median of samples, rounded to four digits.
    pub fn measured(self, name: &'static str, samples: &Samples) -> Self {
        self.with(name, rounded(samples.median()))
    }
}

/// Repeated measurements of one figure.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// No samples.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a sample.
    pub fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    /// The median; NaN without samples.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            odd if odd % 2 == 1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    /// The medians of both, over the rounds that both have samples of.
    pub fn medians_beside(&self, other: &Self) -> (f64, f64) {
        let rounds = self.0.len().min(other.0.len());
        let of = |samples: &Self| Self(samples.0[..rounds].to_vec()).median();
        (of(self), of(other))
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Every sample, in the order taken.
    pub fn values(&self) -> Vec<f64> {
        self.0.iter().copied().map(rounded).collect()
    }

    /// Each sample divided by the sample of `base` from the same round.
    pub fn ratio_to(&self, base: &Self) -> Self {
        Self(
            self.0
                .iter()
                .zip(&base.0)
                .map(|(one, other)| one / other)
                .collect(),
        )
    }

    /// The smallest sample.
    pub fn least(&self) -> f64 {
        rounded(self.0.iter().copied().fold(f64::INFINITY, f64::min))
    }

    /// The largest sample.
    pub fn most(&self) -> f64 {
        rounded(self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max))
    }

    /// The largest sample over the smallest.
    pub fn spread(&self) -> f64 {
        let largest = self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let smallest = self.0.iter().copied().fold(f64::INFINITY, f64::min);
        rounded(largest / smallest)
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(samples: I) -> Self {
        Self(samples.into_iter().collect())
    }
}

/// `value` rounded to four significant digits.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    // Only non-negative powers of ten are exact.
    let scale = 10_f64.powi(digits.abs());
    if digits < 0 {
        return (value / scale).round() * scale;
    }
    (value * scale).round() / scale
}

/// The results of an experiment.
#[derive(Debug)]
pub struct Report {
    experiment: &'static str,
    facts: Vec<(&'static str, Value)>,
    notes: Vec<String>,
    rows: Vec<Row>,
    /// What the table shows instead of the rows, if anything.
    table: Vec<Row>,
}

impl Report {
    /// An empty report.
    pub fn new(experiment: &'static str) -> Self {
        Self {
            experiment,
            facts: Vec::new(),
            notes: Vec::new(),
            rows: Vec::new(),
            table: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn add(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Adds a line of a table that is shown instead of the rows, where these are too many.
    pub fn show(&mut self, row: Row) {
        self.table.push(row);
    }

    /// Adds a line below the table; in the JSON an element of `notes`.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Adds a note unless it is there already.
    pub fn note_once(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Adds a field to the JSON object, beside the rows.
    pub fn fact(&mut self, name: &'static str, value: impl Into<Value>) {
        self.facts.push((name, value.into()));
    }

    /// Prints the report.
    ///
    /// # Errors
    /// If standard output cannot be written to; a closed pipe is not an error.
    pub fn print(&self, as_json: bool) -> Result<()> {
        let text = if as_json {
            format!("{}\n", self.to_json())
        } else {
            self.to_text()
        };
        say(text.as_bytes())
    }

    /// The report as `--json` prints it.
    pub fn to_json(&self) -> Value {
        let object = |row: &Row| {
            let fields = row
                .0
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.clone()));
            Value::Object(fields.collect::<Map<_, _>>())
        };
        let mut report = json!({
            "experiment": self.experiment,
            "host": host(),
            "commit": commit(),
            "notes": self.notes,
            "rows": self.rows.iter().map(object).collect::<Vec<_>>(),
        });
        for (name, value) in &self.facts {
            report[*name] = value.clone();
        }
        report
    }

    fn to_text(&self) -> String {
        let rows = if self.table.is_empty() {
            &self.rows
        } else {
            &self.table
        };
        let mut columns: Vec<&'static str> = Vec::new();
        for (name, value) in rows.iter().flat_map(|row| &row.0) {
            // Arrays of samples are printed in the JSON only.
            if !columns.contains(name) && !value.is_array() {
                columns.push(name);
            }
        }
        let cell = |row: &Row, column: &str| match row.0.iter().find(|(name, _)| *name == column) {
            None | Some((_, Value::Null)) => "-".to_owned(),
            Some((_, Value::String(text))) => text.clone(),
            Some((_, value)) => value.to_string(),
        };
        let widths: Vec<usize> = columns
            .iter()
            .map(|column| {
                let cells = rows.iter().map(|row| cell(row, column).len());
                cells.chain([column.len()]).max().unwrap_or(0)
            })
            .collect();
        let mut text = format!("{} — {}, commit {}\n", self.experiment, host(), commit());
        let mut line = |cells: &mut dyn Iterator<Item = String>| {
            for (cell, width) in cells.zip(&widths) {
                let _ = write!(text, "{cell:>width$}  ");
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        };
        line(&mut columns.iter().map(|column| (*column).to_owned()));
        for row in rows {
            line(&mut columns.iter().map(|column| cell(row, column)));
        }
        for note in &self.notes {
            let _ = writeln!(text, "{note}");
        }
        text
    }
}

/// Kernel, architecture and CPUs of this host, without its name.
pub fn host() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let kernel = read("/proc/sys/kernel/osrelease");
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown CPU", |(_, model)| model);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "Linux {} {}, {cpus} CPUs, {model}",
        kernel.trim(),
        std::env::consts::ARCH
    )
}

/// The commit that this program was built from.
pub fn commit() -> &'static str {
    env!("MEMFOLD_LAB_COMMIT")
}

/// Anonymous memory of this process in bytes (`Anonymous` of `smaps_rollup`).
pub fn anonymous_bytes() -> Result<usize> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let kib = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .context("no Anonymous line in /proc/self/smaps_rollup")?;
    Ok(kib.trim().parse::<usize>()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_spread_of_samples() {
        let mut samples = Samples::default();
        [4.0, 1.0, 2.0]
            .into_iter()
            .for_each(|sample| samples.push(sample));
        assert_eq!((samples.median(), samples.spread()), (2.0, 4.0));
        samples.push(3.0);
        assert_eq!(samples.median(), 2.5);
    }

    #[test]
    fn figures_are_rounded_to_four_digits() {
        assert_eq!(rounded(123_456.0), 123_500.0);
        assert_eq!(rounded(905_712_345.0), 905_700_000.0);
        assert_eq!(rounded(0.012_345_6), 0.012_35);
        assert_eq!(rounded(0.0), 0.0);
    }

    #[test]
    fn a_report_is_one_json_object() {
        let mut report = Report::new("test");
        report.add(Row::new().with("variant", "one").with("value", 2));
        let json = report.to_json();
        assert_eq!(json["experiment"], "test");
        assert_eq!(json["rows"][0]["value"], 2);
        assert!(json["host"].is_string() && json["commit"].is_string());
        assert!(report.to_text().contains("variant  value"));
    }
}
