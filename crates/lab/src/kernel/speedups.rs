//! How many times better than zram memfold is, over all programs.

use std::collections::BTreeMap;

use super::{Run, backend::Backend, case::Case, samples};
use crate::report::{Report, Row, Samples, rounded};

/// Of each backend of memfold the ratio of every program, by its headline metric.
#[derive(Default)]
pub struct Speedups {
    ratios: BTreeMap<String, Samples>,
    /// Cases without a ratio, and why.
    left_out: Vec<String>,
}

impl Speedups {
    /// Adds the runs of a case.
    pub fn add(&mut self, case: &Case, results: &[(&Backend, Vec<Run>)]) {
        let reference = results.iter().find(|(backend, _)| backend.is_reference());
        let Some((zram, theirs)) = reference else {
            return;
        };
        let Some(metric) = case.headline() else {
            self.leave_out(format!("{} (not a program)", case.workload));
            return;
        };
        let theirs = samples(theirs, metric.name);
        for (backend, runs) in results.iter().filter(|(backend, _)| backend.is_memfold()) {
            let ours = samples(runs, metric.name);
            let missing = [(&theirs, zram), (&ours, backend)];
            let missing = missing.iter().find(|(samples, _)| samples.is_empty());
            if let Some((_, without)) = missing {
                self.leave_out(format!("{} (no run under {without})", case.workload));
                continue;
            }
            let (ours, theirs) = ours.medians_beside(&theirs);
            let ratios = self.ratios.entry(backend.to_string()).or_default();
            ratios.push(metric.times_better(ours, theirs));
        }
    }

    fn leave_out(&mut self, case: String) {
        if !self.left_out.contains(&case) {
            self.left_out.push(case);
        }
    }

    /// Adds a note of each mean and, `with_rows`, a row.
    pub fn add_to(&self, report: &mut Report, with_rows: bool) {
        for (backend, ratios) in &self.ratios {
            let mean = geometric_mean(ratios);
            let count = ratios.len();
            report.note(format!(
                "{backend} over zram:lz4, above 1 is better: geometric mean {mean:.2}, least {:.2}, of \
                 {count} programs",
                ratios.least()
            ));
            if with_rows {
                let row = Row::new()
                    .with("contestant", backend.clone())
                    .with("workload", "geomean")
                    .with("comparison", comparison(backend == "memfold-total"))
                    .with("ratio_to_zram", rounded(mean))
                    .with("runs", count)
                    .with("spread", ratios.spread())
                    .with("values", ratios.values());
                report.add(row);
            }
        }
        if !self.ratios.is_empty() && !self.left_out.is_empty() {
            let cases = self.left_out.join(", ");
            report.note(format!("not in the geometric mean: {cases}"));
        }
    }
}

/// What a ratio to zram compares.
pub fn comparison(in_total: bool) -> &'static str {
    if in_total {
        "equal-total"
    } else {
        "equal-resident"
    }
}

fn geometric_mean(ratios: &Samples) -> f64 {
    let logarithms: f64 = ratios.values().iter().map(|ratio| ratio.ln()).sum();
    (logarithms / ratios.len() as f64).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{case::cases, workload::Figures};

    fn run(metric: &str, value: f64) -> Vec<Run> {
        vec![Run {
            figures: Figures::default().with(metric, value),
            killed_before: 0,
            total: None,
            remarks: Vec::new(),
        }]
    }

    #[test]
    fn every_program_counts_by_its_headline_metric() {
        let zram = Backend::parse("zram:lz4").unwrap();
        let mut speedups = Speedups::default();
        let mut add = |workload: &str, metric: &str, theirs: f64, ours: Option<f64>| {
            let case = cases(&[workload], 1.0).unwrap().remove(0);
            let ours = ours.map_or(Vec::new(), |ours| run(metric, ours));
            speedups.add(
                &case,
                &[(&zram, run(metric, theirs)), (&Backend::Memfold, ours)],
            );
        };
        add("cpython", "seconds", 4.0, Some(2.0));
        add("build", "seconds", 3.0, Some(3.0));
        add("munmap-64", "munmap_ms", 100.0, Some(1.0));
        add("node", "seconds", 4.0, None);
        // Half as many requests a second.
        add("redis-get", "requests_per_s", 100.0, Some(50.0));
        assert_eq!(speedups.ratios["memfold"].values(), [2.0, 1.0, 0.5]);
        assert!((geometric_mean(&speedups.ratios["memfold"]) - 1.0).abs() < 1e-9);
        let mut report = Report::new("kernel");
        speedups.add_to(&mut report, true);
        let json = report.to_json();
        let row = &json["rows"][0];
        assert_eq!(
            (&row["workload"], &row["ratio_to_zram"]),
            (&"geomean".into(), &1.0.into())
        );
        assert_eq!((&row["runs"], &row["spread"]), (&3.into(), &4.0.into()));
        let left_out = "munmap-64 (not a program), node (no run under memfold)";
        assert!(
            json["notes"][1].as_str().unwrap().ends_with(left_out),
            "{json}"
        );
    }
}
