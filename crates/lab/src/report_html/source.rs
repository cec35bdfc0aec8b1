//! The experiments' JSON, and queries on it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// One experiment's output.
#[derive(Debug, Clone)]
pub struct Experiment {
    /// Name of the experiment.
    pub name: String,
    /// Its JSON file.
    pub file: PathBuf,
    /// Its content.
    pub json: Value,
}

/// The experiments of a report.
#[derive(Debug, Default)]
pub struct Experiments(pub Vec<Experiment>);

impl Experiment {
    /// Reads the output of an experiment with `--json`.
    pub fn read(file: &Path) -> Result<Self> {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let json: Value = serde_json::from_str(&text)
            .with_context(|| format!("{} is not the JSON of an experiment", file.display()))?;
        let name = json["experiment"].as_str().unwrap_or_default().to_owned();
        ensure!(
            !name.is_empty() && json["rows"].is_array(),
            "{} is not the JSON of an experiment",
            file.display()
        );
        Ok(Self {
            name,
            file: file.to_owned(),
            json,
        })
    }

    /// Its rows.
    pub fn rows(&self) -> impl Iterator<Item = &Value> {
        self.json["rows"].as_array().into_iter().flatten()
    }

    /// Its notes.
    pub fn notes(&self) -> impl Iterator<Item = &str> {
        self.json["notes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
    }
}

impl Experiments {
    /// The rows of one experiment, possibly from several files.
    pub fn rows<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Value> {
        self.0
            .iter()
            .filter(move |one| one.name == name)
            .flat_map(Experiment::rows)
    }

    /// The first row with these fields.
    pub fn find<'a>(&'a self, name: &'a str, wanted: &[(&str, Value)]) -> Option<&'a Value> {
        self.rows(name)
            .find(|row| wanted.iter().all(|(field, value)| row[*field] == *value))
    }

    /// A numeric field of that row.
    pub fn number(&self, name: &str, wanted: &[(&str, Value)], field: &str) -> Option<f64> {
        self.find(name, wanted)?[field].as_f64()
    }

    /// A median of the `kernel` experiment.
    pub fn kernel(
        &self,
        backend: &str,
        workload: &str,
        processes: u64,
        metric: &str,
    ) -> Option<f64> {
        let wanted = [
            ("contestant", backend.into()),
            ("workload", workload.into()),
            ("processes", processes.into()),
            ("metric", metric.into()),
        ];
        self.number("kernel", &wanted, "value")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_are_found_by_their_fields() {
        let kernel = |processes: u64, value: f64| {
            json!({ "experiment": "kernel", "rows": [{ "contestant": "memfold",
                "workload": "munmap-256", "processes": processes, "metric": "munmap_ms",
                "value": value }] })
        };
        let experiment = |json: Value| Experiment {
            name: "kernel".to_owned(),
            file: PathBuf::new(),
            json,
        };
        let all = Experiments(vec![experiment(kernel(1, 0.5)), experiment(kernel(4, 0.7))]);
        assert_eq!(
            all.kernel("memfold", "munmap-256", 4, "munmap_ms"),
            Some(0.7)
        );
        assert_eq!(all.kernel("memfold", "munmap-256", 2, "munmap_ms"), None);
    }

    #[test]
    fn only_an_experiments_json_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("other.json");
        fs::write(&file, "{\"rows\": []}").unwrap();
        assert!(Experiment::read(&file).is_err());
        assert!(Experiment::read(&folder.path().join("none.json")).is_err());
    }
}
