//! One page with everything: published figures beside ours, plots, and the contestants in tables.

mod chart;
mod page;
mod plots;
mod published;
mod source;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use self::source::{Experiment, Experiments};
use crate::{Options, kernel, report};

/// The options of `memfold-lab report`, beside those of `kernel`, which it passes on.
pub const OPTIONS: &[&str] = &["out", "from", "experiments"];
const EXPERIMENTS: &str = "chain,pool,free,table,virtual,exit,kernel";

/// Runs the experiments, or reads what they printed, and writes `index.html`, the plots and the raw
/// JSON into the folder `--out`.
pub fn run(options: &Options) -> Result<()> {
    let out = PathBuf::from(options.value("out").context("--out DIR is missing")?);
    fs::create_dir_all(&out).with_context(|| format!("{} cannot be made", out.display()))?;
    let mut missing = Vec::new();
    let experiments = match options.value("from") {
        Some(files) => read(files, &out)?,
        None => measure(options, &out, &mut missing)?,
    };
    let page = write(&experiments, &missing, &out)?;
    println!("{}", page.display());
    Ok(())
}

/// Reads files that experiments printed and copies them beside the page.
fn read(files: &str, out: &Path) -> Result<Experiments> {
    let mut experiments = Experiments::default();
    for file in files.split(',').map(Path::new) {
        let mut experiment = Experiment::read(file)?;
        let name = file.file_name().context("--from takes files")?;
        let copy = out.join(name);
        if fs::canonicalize(file)? != out.canonicalize()?.join(name) {
            fs::copy(file, &copy)?;
        }
        experiment.file = copy;
        experiments.0.push(experiment);
    }
    Ok(experiments)
}

/// Runs each experiment in a process of its own. One that fails is named on the page; the others
/// are still shown.
fn measure(options: &Options, out: &Path, missing: &mut Vec<String>) -> Result<Experiments> {
    let mut experiments = Experiments::default();
    for name in options.list("experiments", EXPERIMENTS) {
        eprintln!("memfold-lab: {name}");
        let mut command = Command::new(std::env::current_exe()?);
        command.args([name, "--json"]);
        if name == "kernel" {
            for option in kernel::OPTIONS {
                if let Some(value) = options.value(option) {
                    command.args([&format!("--{option}"), value]);
                }
            }
        }
        let output = command.stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            let note = format!("{name} could not be measured here ({})", output.status);
            eprintln!("memfold-lab: {note}");
            missing.push(note);
            continue;
        }
        let file = out.join(format!("{name}.json"));
        fs::write(&file, &output.stdout)?;
        experiments.0.push(Experiment::read(&file)?);
    }
    ensure!(!experiments.0.is_empty(), "no experiment could be measured");
    Ok(experiments)
}

fn write(experiments: &Experiments, missing: &[String], out: &Path) -> Result<PathBuf> {
    let mut svgs = Vec::new();
    for chart in plots::plots(experiments) {
        let svg = chart.to_svg()?;
        fs::write(out.join(format!("{}.svg", chart.file)), &svg)?;
        svgs.push((chart.file.to_owned(), svg));
    }
    let recorded = |field: &str| {
        let text = experiments
            .0
            .first()
            .and_then(|one| one.json[field].as_str());
        text.map(str::to_owned)
    };
    let parts = page::Parts {
        experiments,
        threads: &published::threads(experiments),
        plots: &svgs,
        missing,
        // That of the figures, not of the machine that writes the page.
        host: recorded("host").unwrap_or_else(report::host),
        commit: recorded("commit").unwrap_or_else(report::commit),
    };
    let page = out.join("index.html");
    fs::write(&page, page::page(&parts))?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_whole_and_says_what_was_not_measured() {
        let folder = tempfile::tempdir().unwrap();
        let from = folder.path().join("kernel.json");
        let row = serde_json::json!({ "contestant": "memfold", "workload": "munmap-64",
            "megabytes": 64, "processes": 1, "data": "phrases", "metric": "munmap_ms",
            "value": 0.25, "unit": "ms", "runs": 2, "spread": 1.1, "values": [0.24, 0.26] });
        let json = serde_json::json!({ "experiment": "kernel", "host": "a <host>", "commit": "abc",
            "notes": ["SKIPPED numpy: not there"], "rows": [row] });
        fs::write(&from, json.to_string()).unwrap();
        let out = folder.path().join("out");
        fs::create_dir(&out).unwrap();
        let experiments = read(from.to_str().unwrap(), &out).unwrap();
        let page = write(
            &experiments,
            &["exit could not be measured".to_owned()],
            &out,
        )
        .unwrap();
        let html = fs::read_to_string(page).unwrap();
        for wanted in [
            "a &lt;host&gt;",
            "munmap-64, 64 MB",
            "not measured",
            "SKIPPED numpy",
            "exit could not be measured",
            "<svg",
            "0.25",
        ] {
            assert!(html.contains(wanted), "{wanted}");
        }
        assert!(
            !html.contains("src=") && !html.contains("<link"),
            "it loads something"
        );
        assert!(out.join("kernel.json").exists() && out.join("munmap-sizes.svg").exists());
    }
}
