//! The report: one HTML page with the published figures beside memfold's, plots, and tables of all
//! backends.

mod chart;
mod page;
mod plots;
mod published;
mod source;
mod summary;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};

use self::source::{Experiment, Experiments};
use crate::{Options, growth, host, kernel, output::say, report};

/// The default of `--experiments`.
const EXPERIMENTS: &str = "chain,pool,free,table,virtual,exit,growth,kernel";
/// Groups of `kernel` that are run three times by default, as their runs take long.
const LONG: [&str; 4] = ["redis-get", "redis-get-bgsave", "build", "overhead"];

/// Options that select what the table of `docs/measurements.md` needs.
const FOR_SUMMARY: &[(&str, &str)] = &[
    ("experiments", "kernel"),
    ("workload", "summary"),
    ("against", "native,zram:lz4,zswap,memfold"),
];

/// Runs the experiments, or reads their JSON with `--from`, and writes `index.html`, the plots and
/// the JSON to the folder `--out`. With `--markdown`, measures only what the table of
/// `docs/measurements.md` needs, and prints it.
pub fn run(options: Options) -> Result<()> {
    let markdown = options.has("markdown");
    let options = match (markdown, options.value("from")) {
        (true, None) => options.or(FOR_SUMMARY),
        _ => options,
    };
    let out = options.value("out").map(PathBuf::from);
    if let Some(out) = &out {
        fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    }
    let mut missing = Vec::new();
    let experiments = match (options.value("from"), &out) {
        (Some(files), _) => read(files, out.as_deref())?,
        (None, Some(out)) => measure(&options, out, &mut missing)?,
        (None, None) => bail!("--out DIR is missing"),
    };
    if let Some(out) = out {
        let page = write(&experiments, &missing, &repeat(&options), &out)?;
        if !markdown {
            say(format!("{}\n", page.display()).as_bytes())?;
        }
    }
    if markdown {
        let table = summary::markdown(&experiments);
        let table = table.context("no row of the table was measured")?;
        say(table.as_bytes())?;
    }
    Ok(())
}

/// Reads JSON of experiments, and copies the files to the folder of the page, if any.
fn read(files: &str, out: Option<&Path>) -> Result<Experiments> {
    let mut experiments = Experiments::default();
    for file in files.split(',').map(Path::new) {
        let mut experiment = Experiment::read(file)?;
        if let Some(out) = out {
            let name = file.file_name().context("--from takes files")?;
            let copy = out.join(name);
            if fs::canonicalize(file)? != out.canonicalize()?.join(name) {
                fs::copy(file, &copy)?;
            }
            experiment.file = copy;
        }
        experiments.0.push(experiment);
    }
    Ok(experiments)
}

/// A child process of the lab, and the file for its output.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    file: String,
    arguments: Vec<String>,
}

/// The processes to run for an experiment. `kernel` runs one group of workloads per process, so
/// that a failure loses that group only.
fn parts(name: &str, options: &Options) -> Result<Vec<Part>> {
    let scale = kernel::scale(options)?;
    // At most 1 GB, whatever the scale.
    let megabytes = |at_one: f64| (at_one * scale).round().clamp(4.0, 1024.0).to_string();
    let given = |option: &str| {
        let value = options.value(option).map(str::to_owned);
        value.map_or(Vec::new(), |value| vec![format!("--{option}"), value])
    };
    let part = |file: &str, more: Vec<String>| Part {
        file: format!("{file}.json"),
        arguments: [vec![name.to_owned(), "--json".to_owned()], more].concat(),
    };
    let sized = |size: String| [vec!["--megabytes".to_owned(), size], given("runs")].concat();
    Ok(match name {
        "free" => vec![part(name, sized(megabytes(256.0)))],
        "table" | "exit" => vec![part(name, sized(megabytes(320.0)))],
        "virtual" => vec![part(name, sized(megabytes(160.0)))],
        "growth" => {
            let scale = scale.max(growth::LEAST_SCALE);
            let words = vec!["--scale".to_owned(), scale.to_string()];
            vec![part(
                name,
                [words, given("runs"), given("memfold")].concat(),
            )]
        }
        "kernel" => {
            let every = kernel::GROUPS.join(",");
            let of_group = |group: &str| {
                let mut words = vec!["--workload".to_owned(), group.to_owned()];
                let others = kernel::OPTIONS.iter().filter(|name| **name != "workload");
                words.extend(others.flat_map(|option| given(option)));
                if options.value("runs").is_none() {
                    let runs = default_runs(group, options.has("markdown"));
                    words.extend(["--runs".to_owned(), runs.to_string()]);
                }
                part(&format!("kernel-{}", group.replace(':', "-")), words)
            };
            let groups = kernel::workload_names(&options.list("workload", &every));
            groups.into_iter().map(of_group).collect()
        }
        _ => vec![part(name, Vec::new())],
    })
}

/// Default number of rounds of a group of `kernel`.
fn default_runs(group: &str, is_for_summary: bool) -> u32 {
    match group {
        // Its rounds vary by more than its backends differ.
        "redis-get" if is_for_summary => 15,
        _ if LONG.contains(&group) && !is_for_summary => 3,
        _ => 5,
    }
}

/// Runs each part in a process of its own. The page names the parts that failed.
fn measure(options: &Options, out: &Path, missing: &mut Vec<String>) -> Result<Experiments> {
    let mut experiments = Experiments::default();
    let mut all = Vec::new();
    for name in options.list("experiments", EXPERIMENTS) {
        all.extend(parts(name, options)?);
    }
    let started = Instant::now();
    for (number, part) in all.iter().enumerate() {
        let words = part.arguments.join(" ");
        let minutes = started.elapsed().as_secs_f64() / 60.0;
        let place = format!("{} of {}", number + 1, all.len());
        eprintln!("memfold-lab: {place}, after {minutes:.1} minutes: {words}");
        let mut command = Command::new(std::env::current_exe()?);
        command.args(&part.arguments).stdout(Stdio::piped());
        let child = kernel::start_to_end_with_us(&mut command, libc::SIGTERM)?;
        let output = host::while_running(child.id(), || child.wait_with_output())??;
        if !output.status.success() {
            let note = format!("FAILED ({}): {words}", output.status);
            eprintln!("memfold-lab: {note}");
            missing.push(note);
            continue;
        }
        let file = out.join(&part.file);
        fs::write(&file, &output.stdout)?;
        experiments.0.push(Experiment::read(&file)?);
    }
    ensure!(
        !experiments.0.is_empty(),
        "no experiment succeeded: see the errors above"
    );
    Ok(experiments)
}

/// The command that reproduces the page.
fn repeat(options: &Options) -> String {
    let mut words = vec!["memfold-lab report --out DIR".to_owned()];
    for option in kernel::OPTIONS.iter().chain(&["experiments"]) {
        if let Some(value) = options.value(option) {
            words.push(format!("--{option} {value}"));
        }
    }
    words.join(" ")
}

fn write(
    experiments: &Experiments,
    missing: &[String],
    repeat: &str,
    out: &Path,
) -> Result<PathBuf> {
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
        repeat,
        // The host that was measured, not the one that writes the page.
        host: recorded("host").unwrap_or_else(report::host),
        commit: recorded("commit").unwrap_or_else(|| report::commit().to_owned()),
    };
    let page = out.join("index.html");
    fs::write(&page, page::page(&parts))?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_is_run_a_group_at_a_time_at_the_given_scale() {
        let options = Options::of(&[("scale", "0.5"), ("workload", "munmap,zipf"), ("runs", "7")]);
        let words = |name| -> Vec<String> {
            let parts = parts(name, &options).unwrap();
            parts.iter().map(|part| part.arguments.join(" ")).collect()
        };
        assert_eq!(
            words("kernel"),
            [
                "kernel --json --workload munmap --scale 0.5 --runs 7",
                "kernel --json --workload zipf --scale 0.5 --runs 7"
            ]
        );
        assert_eq!(words("free"), ["free --json --megabytes 128 --runs 7"]);
        assert_eq!(words("growth"), ["growth --json --scale 0.5 --runs 7"]);
        let few = Options::of(&[("workload", "build")]);
        let part = &super::parts("kernel", &few).unwrap()[0];
        assert_eq!(
            part.arguments.join(" "),
            "kernel --json --workload build --runs 3"
        );
        let runs = [("redis-get", true), ("redis-get", false), ("build", true)]
            .map(|(group, is_for_summary)| default_runs(group, is_for_summary));
        assert_eq!(runs, [15, 3, 5]);
        let bad = Options::of(&[("scale", "none")]);
        assert!(parts("chain", &bad).is_err());
    }

    #[test]
    fn a_page_shows_the_cost_over_size() {
        let folder = tempfile::tempdir().unwrap();
        let from = folder.path().join("growth.json");
        let small = serde_json::json!({ "grown": "nothing", "small_size": null, "size": null,
            "wall_us": 7.5, "own_percent": 0.7, "rest_percent": 0.2, "misses": "none" });
        let grown = serde_json::json!({ "grown": "processes", "small_size": "1", "size": "200",
            "wall_ratio": 1.31, "wall_least": 1.2, "wall_most": 1.4, "wall_ratios": [1.2, 1.31, 1.4],
            "cpu_ratio": 1.02, "cpu_least": 1.0, "cpu_most": 1.1, "cpu_ratios": [1.0, 1.02, 1.1],
            "wall_us": 9.8, "own_percent": 0.9, "rest_percent": 3.4, "misses": "wall+rest" });
        let left_out = serde_json::json!({ "grown": "bytes", "small_size": "625 MiB",
            "size": "16384 MiB" });
        let json = serde_json::json!({ "experiment": "growth", "host": "a host", "commit": "abc",
            "notes": ["bytes is left out: no memory"], "rows": [small, grown, left_out] });
        fs::write(&from, json.to_string()).unwrap();
        let experiments = read(from.to_str().unwrap(), None).unwrap();
        let page = write(&experiments, &[], "memfold-lab report", folder.path()).unwrap();
        let html = fs::read_to_string(page).unwrap();
        for wanted in [
            "Cost over size",
            "processes: 1 → 200",
            "1.31× (1.20× to 1.40×)",
            "wall+rest",
            "bytes: 625 MiB → 16384 MiB",
            "id=\"growth\"",
            "bytes is left out",
        ] {
            assert!(html.contains(wanted), "{wanted}");
        }
        assert!(folder.path().join("growth.svg").exists());
    }

    #[test]
    fn a_page_is_complete_and_names_what_was_not_measured() {
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
        let experiments = read(from.to_str().unwrap(), Some(&out)).unwrap();
        let page = write(
            &experiments,
            &["FAILED: exit".to_owned()],
            "memfold-lab report --out DIR --scale 3",
            &out,
        )
        .unwrap();
        let html = fs::read_to_string(page).unwrap();
        for wanted in [
            "a &lt;host&gt;",
            "munmap-64, 64 MB",
            "not measured",
            "SKIPPED numpy",
            "FAILED: exit",
            "--scale 3",
            "<svg",
            "0.25",
        ] {
            assert!(html.contains(wanted), "{wanted}");
        }
        assert!(
            !html.contains("src=") && !html.contains("<link"),
            "the page loads an external resource"
        );
        assert!(out.join("kernel.json").exists() && out.join("munmap-sizes.svg").exists());
    }
}
