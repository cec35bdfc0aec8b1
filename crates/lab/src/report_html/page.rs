//! The HTML page: one file, without external resources.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde_json::Value;

use super::{
    chart::{colour, short},
    plots::FREES,
    published::{Line, Thread},
    source::{Experiment, Experiments},
};
use crate::kernel::{find_metric, is_cost};

const STYLE: &str = "
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem }
table { border-collapse: collapse; font-size: 13px; width: 100% }
th, td { text-align: right; padding: .18rem .45rem; border-bottom: 1px solid #e6e6e6; vertical-align: top }
th { font-weight: 600; border-bottom: 1px solid #999 } th:first-child, td:first-child { text-align: left }
td.text, th:last-child.text { text-align: left; color: #555 } td.figure { white-space: nowrap } td.what { min-width: 13rem } .better { color: #1a7f37; font-weight: 600 } .worse { color: #b3261e; font-weight: 600 }
.spread, .missing { color: #888; font-size: 11px } tr.cost td:first-child { color: #777 }
figure { margin: 1rem 0 } figure svg { width: 100%; height: auto } .key span { display: inline-block; margin-right: 1.1rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em } code { font-size: 12.5px; background: #f4f4f4; padding: 0 .2em }
details { margin: .5rem 0; overflow-x: auto } summary { cursor: pointer; font-weight: 600 }
tr.lost { background: #fdf3f2 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: 13px } dt { color: #666 } dd { margin: 0 }
@page { size: A4; margin: 12mm }
@media print {
  body { max-width: none; margin: 0; padding: 0; font-size: 11px } h1 { font-size: 17px } h2 { font-size: 14px } h3 { font-size: 12px }
  table { font-size: 8.5px } th, td { padding: .15rem .25rem; overflow-wrap: anywhere } td.what { min-width: 8rem } .spread, .missing { font-size: 7.5px }
  dl, code { font-size: 10px } dd code { white-space: pre-wrap }
  h2, h3 { break-after: avoid } tr, figure, section { break-inside: avoid } thead { display: table-header-group } details { display: none }
  .spread, .missing, tr.cost td:first-child, td.text, dt { color: #444 }
}
";

/// The contents of the page.
pub struct Parts<'a> {
    /// All results.
    pub experiments: &'a Experiments,
    /// Published figures by mailing-list thread.
    pub threads: &'a [Thread],
    /// File names and SVGs of the charts.
    pub plots: &'a [(String, String)],
    /// Notes about parts that failed.
    pub missing: &'a [String],
    /// The command that reproduces the page.
    pub repeat: &'a str,
    /// The host measured.
    pub host: String,
    /// The commit measured.
    pub commit: String,
}

/// Renders the page.
pub fn page(parts: &Parts<'_>) -> String {
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width";
                title { "Compressed swap, measured" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "Compressed swap, measured" }
                p { "memfold beside the kernel's zram and zswap, and beside figures published on linux-mm." }
                (facts(parts))
                h2 { "Published figures, there and here" }
                p { "“There” are the authors' measurements on their machines; “here” are the replaced \
                     design and memfold's, measured on this host. A gain is the ratio of the two; \
                     below 1 (▾) memfold is worse. Sizes are scaled, so compare gains, not times." }
                @for thread in parts.threads { (published(thread)) }
                h2 { "Plots" }
                (key(parts.experiments))
                p { "Bars are medians, circles are single runs. Scales are logarithmic." }
                @for (name, svg) in parts.plots {
                    figure id=(name) { (PreEscaped(svg)) }
                }
                h2 { "Backends side by side" }
                p { "Medians; in grey the largest run over the smallest. “×” is the ratio to zram with \
                     lz4: above 1 is better, ▾ is worse. Grey rows are resource costs. A cgroup is also \
                     charged for page cache and page tables; memfold counts anonymous pages only." }
                @for group in groups_of(parts.experiments, |_| true) { (side_by_side(&group)) }
                (over_size(parts.experiments))
                h2 { "Designs by themselves" }
                p { "All rows of the experiments on single components, collapsed (and omitted in print); \
                     the lab's README describes them." }
                @for one in parts.experiments.0.iter().filter(|one| one.name != "kernel") { (whole_table(one)) }
                (notes(parts))
            }
        }
    };
    markup.into_string()
}

fn facts(parts: &Parts<'_>) -> Markup {
    let kernel = parts.experiments.0.iter().find(|one| one.name == "kernel");
    let facts = kernel.map(|one| &one.json["host_facts"]);
    let commits = parts
        .experiments
        .0
        .iter()
        .filter_map(|one| one.json["commit"].as_str());
    let mut commits: Vec<&str> = commits.collect();
    commits.sort_unstable();
    commits.dedup();
    html! {
        dl {
            dt { "host" } dd { (parts.host) }
            dt { "commit" } dd { @if commits.is_empty() { (parts.commit) } @else { (commits.join(", ")) } }
            @if let Some(kernel) = kernel {
                dt { "scale" } dd { (kernel.json["scale"]) " (1 is the published sizes)" }
            }
            @if let Some(Value::Object(facts)) = facts {
                dt { "memory" } dd { (plain(&facts["memory_mebibytes"])) " MiB" }
                dt { "settings" } dd {
                    "page-cluster " (plain(&facts["page_cluster"]))
                    ", swappiness " (plain(&facts["swappiness"]))
                    ", huge pages " (plain(&facts["transparent_hugepage"]))
                    ", lru_gen " (plain(&facts["multigenerational_lru"]))
                }
            }
            dt { "repeat with" } dd { code { (parts.repeat) } }
        }
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn published(thread: &Thread) -> Markup {
    html! {
        h3 { (thread.title) }
        table {
            thead { tr { th { "what" } th { "there: before → after" } th { "gain there" } th { "here: before" } th { "here: memfold" } th { "gain here" } th.text { "measured by" } } }
            @for line in &thread.lines {
                tr class=[line.gain().filter(|gain| judged(*gain) == "worse").map(|_| "lost")] {
                    td.what { (line.what) }
                    td { (line.published) }
                    td { @match line.published_gain { Some(gain) => { (times(gain)) } None => { "–" } } }
                    td.figure { (figure(line.before, line.unit)) }
                    td.figure { (figure(line.after, line.unit)) }
                    td.figure { (gain(line)) }
                    td.text { (line.here) }
                }
            }
        }
    }
}

fn figure(value: Option<f64>, unit: &str) -> Markup {
    match value {
        Some(value) => html! { (short(value)) " " (unit) },
        None => html! { span.missing { "not measured" } },
    }
}

fn gain(line: &Line) -> Markup {
    match line.gain() {
        Some(gain) => html! { (judgement(gain)) },
        None if line.after == Some(0.0) => html! { span.better { "all" } },
        None => html! { "–" },
    }
}

/// A ratio; one below 1 is marked ▾, which also shows in print.
fn judgement(ratio: f64) -> Markup {
    let judged = judged(ratio);
    html! {
        span class=(judged) { (times(ratio)) @if judged == "worse" { " ▾" } }
    }
}

/// A ratio, to two decimals or three digits.
pub fn times(ratio: f64) -> String {
    match ratio {
        small if small < 0.1 => format!("{}×", short(small)),
        ratio if ratio < 10.0 => format!("{ratio:.2}×"),
        ratio => format!("{}×", short(ratio)),
    }
}

/// A ratio within 2 % of 1 is neither better nor worse.
fn judged(gain: f64) -> &'static str {
    if gain > 1.02 {
        "better"
    } else if gain < 0.98 {
        "worse"
    } else {
        "even"
    }
}

fn key(all: &Experiments) -> Markup {
    let frees = all.rows("free").next().map_or(&[][..], |_| &FREES);
    let frees = frees.iter().map(|name| (*name).to_owned()).collect();
    html! {
        @for names in [backends(all.rows("kernel")), frees] {
            p.key {
                @for name in names {
                    @let fill = colour(&name);
                    span { i style=(format!("background:rgb({},{},{})", fill.0, fill.1, fill.2)) {} (name) }
                }
            }
        }
    }
}

fn backends<'a>(rows: impl Iterator<Item = &'a Value>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for name in rows.filter_map(|row| row["contestant"].as_str()) {
        if !names.iter().any(|one| one == name) {
            names.push(name.to_owned());
        }
    }
    names
}

/// The rows of `kernel` for one workload at one size.
pub struct Group<'a> {
    title: String,
    /// A row per backend and metric.
    pub rows: Vec<&'a Value>,
}

/// Groups the rows that `wanted` accepts. Those of a geometric mean are of no metric, and left out.
pub fn groups_of(all: &Experiments, wanted: impl Fn(&Value) -> bool) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    let measured = |row: &&Value| row["metric"].is_string() && wanted(row);
    for row in all.rows("kernel").filter(measured) {
        let mut title = format!("{}, {} MB", plain(&row["workload"]), row["megabytes"]);
        if row["processes"] != 1 {
            title += &format!(" × {} processes", row["processes"]);
        }
        if let Some(data) = row["data"].as_str() {
            title += &format!(", {data}");
        }
        match groups.iter_mut().find(|group| group.title == title) {
            Some(group) => group.rows.push(row),
            None => groups.push(Group {
                title,
                rows: vec![row],
            }),
        }
    }
    groups
}

fn side_by_side(group: &Group<'_>) -> Markup {
    let names = backends(group.rows.iter().copied());
    let mut metrics: Vec<&str> = Vec::new();
    for metric in group.rows.iter().filter_map(|row| row["metric"].as_str()) {
        if !metrics.contains(&metric) {
            metrics.push(metric);
        }
    }
    let resident = group
        .rows
        .iter()
        .find_map(|row| row["resident_megabytes"].as_u64());
    let cell = |name: &str, metric: &str| {
        let wanted = |row: &&&Value| row["contestant"] == name && row["metric"] == metric;
        group.rows.iter().find(wanted).copied()
    };
    html! {
        section {
            h3 {
                (group.title)
                @if let Some(resident) = resident { ", " (resident) " MB resident" }
            }
            table {
                thead { tr { th { "" } @for name in &names { th { (name) } } } }
                @for metric in metrics {
                    @let first = names.iter().find_map(|name| cell(name, metric));
                    tr class=[first.filter(|row| is_cost(row)).map(|_| "cost")] {
                        td { (metric_label(metric)) }
                        @for name in &names { td { (measured(cell(name, metric))) } }
                    }
                }
            }
        }
    }
}

/// All rows of an experiment, collapsed.
fn whole_table(experiment: &Experiment) -> Markup {
    let mut columns: Vec<&str> = Vec::new();
    for (name, _) in experiment.rows().filter_map(Value::as_object).flatten() {
        if !columns.contains(&name.as_str()) {
            columns.push(name);
        }
    }
    // Inputs first, then figures.
    let figures = |name: &&str| experiment.rows().any(|row| row[*name].is_f64());
    let (figures, inputs): (Vec<&str>, Vec<&str>) = columns.into_iter().partition(figures);
    html! {
        details {
            summary { (experiment.name) ", " (experiment.rows().count()) " rows" }
            table {
                tr { @for name in inputs.iter().chain(&figures) { th { (name.replace('_', " ")) } } }
                @for row in experiment.rows() {
                    tr {
                        @for name in inputs.iter().chain(&figures) {
                            td { (match row[*name].as_f64() {
                                Some(number) if row[*name].is_f64() => short(number),
                                _ => plain(&row[*name]),
                            }) }
                        }
                    }
                }
            }
        }
    }
}

/// The cost of a page in each grown case.
fn over_size(all: &Experiments) -> Markup {
    let rows: Vec<&Value> = all.rows("growth").collect();
    let of = |row: &Value, name: &str| row[name].as_f64();
    let number = |row: &Value, name: &str| of(row, name).map_or("–".to_owned(), short);
    let ratio = |row: &Value, [middle, least, most]: [&str; 3]| {
        let all = (of(row, middle), of(row, least), of(row, most));
        let (Some(middle), Some(least), Some(most)) = all else {
            return "–".to_owned();
        };
        format!("{} ({} to {})", times(middle), times(least), times(most))
    };
    html! {
        @if !rows.is_empty() {
            h2 { "Cost over size" }
            p { "Programs visit all of their pages, of which a quarter may be resident. Times are for each page that \
                 comes in while another goes out; ratios are to the small case of the same round (median, least, \
                 most). “Own” is memfold's memory without the pool, in per cent of the programs' memory; “at rest” \
                 its CPU time while all programs sleep, in per cent of a CPU." }
            table {
                thead { tr { th { "grown" } th { "wall time" } th { "CPU time" } th { "µs a page" } th { "own" } th { "at rest" } th.text { "misses its goal" } } }
                @for row in rows {
                    tr class=[row["misses"].as_str().filter(|misses| *misses != "none").map(|_| "lost")] {
                        td {
                            (plain(&row["grown"]))
                            @if let (Some(from), Some(to)) = (row["small_size"].as_str(), row["size"].as_str()) {
                                ": " (from) " → " (to)
                            }
                        }
                        td.figure { (ratio(row, ["wall_ratio", "wall_least", "wall_most"])) }
                        td.figure { (ratio(row, ["cpu_ratio", "cpu_least", "cpu_most"])) }
                        td { (number(row, "wall_us")) }
                        td { (number(row, "own_percent")) " %" }
                        td { (number(row, "rest_percent")) " %" }
                        td.text { (plain(&row["misses"])) }
                    }
                }
            }
        }
    }
}

fn metric_label(metric: &str) -> String {
    let unit = find_metric(metric).map_or("", |metric| metric.unit);
    let mut name = metric;
    for ending in ["_mib_per_s", "_per_s", "_ms", "_us", "_s", "_mib"] {
        name = name.strip_suffix(ending).unwrap_or(name);
    }
    format!("{} ({unit})", name.replace('_', " "))
}

fn measured(row: Option<&Value>) -> Markup {
    let Some((row, value)) = row.and_then(|row| Some((row, row["value"].as_f64()?))) else {
        return html! { span.missing { "–" } };
    };
    let ratio = row["ratio_to_zram"]
        .as_f64()
        .filter(|_| row["contestant"] != "zram:lz4");
    html! {
        (short(value))
        @if let Some(spread) = row["spread"].as_f64() { span.spread { " " (format!("{spread:.2}")) } }
        @if let Some(ratio) = ratio { br; (judgement(ratio)) }
    }
}

fn notes(parts: &Parts<'_>) -> Markup {
    let mut notes: Vec<(&str, &str)> = Vec::new();
    for one in &parts.experiments.0 {
        for note in one.notes().map(|note| (one.name.as_str(), note)) {
            if !notes.contains(&note) {
                notes.push(note);
            }
        }
    }
    html! {
        @if !notes.is_empty() || !parts.missing.is_empty() {
            h2 { "Notes" }
            ul {
                @for note in parts.missing { li { (note) } }
                @for (name, note) in notes { li { b { (name) } " – " (note) } }
            }
        }
        h2 { "Raw figures" }
        p {
            "Every run, as JSON, in this folder: "
            @for one in &parts.experiments.0 {
                @let name = one.file.file_name().unwrap_or_default().to_string_lossy();
                a href=(name) { (name) } " "
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_geometric_mean_has_no_section() {
        let all = Experiments(vec![Experiment {
            name: "kernel".to_owned(),
            file: PathBuf::new(),
            json: json!({ "rows": [
                { "contestant": "memfold", "workload": "cpython", "megabytes": 100, "processes": 1,
                  "metric": "seconds", "value": 2.0 },
                { "contestant": "memfold", "workload": "geomean", "ratio_to_zram": 1.1, "runs": 9 },
            ] }),
        }]);
        let titles: Vec<_> = groups_of(&all, |_| true)
            .into_iter()
            .map(|group| group.title)
            .collect();
        assert_eq!(titles, ["cpython, 100 MB"]);
    }
}
