//! The mailing-list thread on deferred and lock-free frees.

use serde_json::Value;

use super::{super::source::Experiments, Line, against_zram};

/// Its lines.
pub fn lines(all: &Experiments) -> Vec<Line> {
    let parts = [unmap(all), class_index(all), deferred(all), whole_cost(all)];
    parts.into_iter().flatten().collect()
}

fn unmap(all: &Experiments) -> Vec<Line> {
    let mut lines = vec![
        against_zram(
            all,
            "munmap of a 256 MB swapped range, deferred (RK3588)",
            ("63.1 → 18.6 ms", Some(3.4)),
            ("munmap-256", 1, "munmap_ms"),
            "ms",
        ),
        against_zram(
            all,
            "three processes of 256 MB at once, deferred (RPi 4B)",
            ("153.2 → 51.5 ms", Some(2.97)),
            ("munmap-256", 3, "munmap_ms"),
            "ms",
        ),
        against_zram(
            all,
            "swap-in of 256 MB, four phrases, in order",
            ("1358 → 1104 ms", Some(1.22)),
            ("swap-in-sequential", 1, "seconds"),
            "s",
        ),
        against_zram(
            all,
            "the same, recorded pages, served by the library",
            ("1358 → 1104 ms", Some(1.22)),
            ("embedded-swap-in-sequential", 1, "seconds"),
            "s",
        ),
    ];
    let sizes = [
        (64, "15.0 → 4.3 ms", 3.47),
        (128, "28.7 → 8.5 ms", 3.37),
        (192, "43.2 → 13.0 ms", 3.32),
        (512, "114.4 → 38.5 ms", 2.97),
    ];
    for (megabytes, published, gain) in sizes {
        lines.push(against_zram(
            all,
            &format!("munmap of {megabytes} MB, deferred (RPi 4B)"),
            (published, Some(gain)),
            (&format!("munmap-{megabytes}"), 1, "munmap_ms"),
            "ms",
        ));
    }
    lines
}

/// A line with two variants of `free`.
fn frees(
    all: &Experiments,
    what: &str,
    published: (&'static str, Option<f64>),
    variants: [&str; 2],
    wanted: &[(&str, Value)],
    metric: &str,
) -> Line {
    let row = |variant: &str| {
        let mut wanted = wanted.to_vec();
        wanted.push(("variant", variant.into()));
        all.number("free", &wanted, metric)
    };
    let [before, after] = variants;
    let conditions: Vec<String> = wanted
        .iter()
        .map(|(name, value)| format!("{name} {}", value.to_string().replace('"', "")))
        .collect();
    Line {
        what: what.to_owned(),
        published: published.0,
        published_gain: published.1,
        here: format!(
            "free, {metric}, {}: {before}, {after}",
            conditions.join(", ")
        ),
        before: row(before),
        after: row(after),
        unit: "ns",
        more_is_better: false,
    }
}

fn class_index(all: &Experiments) -> Vec<Line> {
    let published = [
        (1, "RPi 4B 59.0 → 56.0 ms; i7-12700 11.7 → 9.8 ms", 1.05),
        (2, "RPi 4B 94.6 → 66.7 ms; i7-12700 24.1 → 17.2 ms", 1.42),
        (4, "RPi 4B 202.9 → 110.6 ms; i7-12700 63.0 → 45.3 ms", 1.83),
    ];
    let line = |(threads, figures, gain): (u64, &'static str, f64)| {
        frees(
            all,
            &format!("class index in the object word alone, {threads} at once"),
            (figures, Some(gain)),
            ["pool-lock", "class-index"],
            &conditions(threads, "idle", false),
            "caller_ns_per_free",
        )
    };
    published.into_iter().map(line).collect()
}

fn deferred(all: &Experiments) -> Vec<Line> {
    let line = |threads, published, variant| {
        frees(
            all,
            &format!("the same and deferred, {threads} at once; {variant} here"),
            published,
            ["pool-lock", variant],
            &conditions(threads, "idle", false),
            "caller_ns_per_free",
        )
    };
    vec![
        line(1, ("56.2 → 17.2 ms", Some(3.27)), "deferred"),
        line(1, ("without any slot lock, a bound", Some(6.3)), "bulk"),
        line(2, ("not published for two", None), "deferred"),
    ]
}

fn whole_cost(all: &Experiments) -> Vec<Line> {
    let asked = ("asked in review, not answered there", None);
    let line = |what, variants, (cpus, compactor), metric| {
        let conditions = conditions(1, cpus, compactor);
        frees(all, what, asked, variants, &conditions, metric)
    };
    // The kernel frees a page with a function call, where user space needs a system call.
    let kept = "pool-lock-kept";
    vec![
        line(
            "is CPU time lower, or only moved? (deferred)",
            ["pool-lock", "deferred"],
            ("idle", false),
            "cpu_ns_per_free",
        ),
        line(
            "the same, in bulk",
            ["pool-lock", "bulk"],
            ("idle", false),
            "cpu_ns_per_free",
        ),
        line(
            "the same, deferred; before: pages are kept for reuse",
            [kept, "deferred"],
            ("idle", false),
            "cpu_ns_per_free",
        ),
        line(
            "the same; before: pages are kept for reuse; wall time of the caller",
            [kept, "deferred"],
            ("idle", false),
            "caller_ns_per_free",
        ),
        line(
            "with busy CPUs?",
            ["pool-lock", "deferred"],
            ("busy", false),
            "caller_ns_per_free",
        ),
        line(
            "with compaction running?",
            ["pool-lock", "deferred"],
            ("idle", true),
            "caller_ns_per_free",
        ),
    ]
}

fn conditions(threads: u64, cpus: &str, compactor: bool) -> [(&'static str, Value); 3] {
    [
        ("threads", threads.into()),
        ("compactor", compactor.into()),
        ("cpus", cpus.into()),
    ]
}
