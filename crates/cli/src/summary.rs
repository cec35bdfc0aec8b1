//! What is printed about a run when it ends: what it would have needed, what it got, whether the limit was
//! kept, what that cost, and which limit would be comfortable.

use crate::format::{bytes, duration, grouped};
use crate::report::{LimitKind, Statistics};

/// When a summary is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SummaryWhen {
    /// When there is something to tell.
    Auto,
    /// After each run.
    Always,
    /// After none.
    Never,
}

/// Suggested limits are whole multiples of this.
const WHOLE: u64 = 1 << 20;

/// The lines to print; none where there is nothing to tell.
pub fn summary(program: &str, statistics: &Statistics, when: SummaryWhen) -> Vec<String> {
    let is_told = match when {
        SummaryWhen::Always => true,
        SummaryWhen::Never => false,
        SummaryWhen::Auto => is_worth_telling(statistics),
    };
    if !is_told {
        return Vec::new();
    }
    let name = statistics.programs.name.as_deref().unwrap_or(program);
    let lines = [
        Some(memory(name, statistics)),
        time(statistics),
        remote(statistics),
        beside(statistics),
    ];
    lines.into_iter().flatten().collect()
}

/// Whether pages went out, the limit was not kept, or what memfold does not manage took more than the limit.
fn is_worth_telling(statistics: &Statistics) -> bool {
    let (limit, _) = statistics.limit_in_force();
    statistics.totals.pages_out > 0 || !statistics.is_limit_kept() || unmanaged(statistics) > limit
}

/// Memory outside the limit, at most.
fn unmanaged(statistics: &Statistics) -> u64 {
    let mapped = statistics.totals.peak_mapped_bytes;
    mapped.saturating_add(statistics.programs.peak_unmanaged_bytes)
}

fn memory(name: &str, statistics: &Statistics) -> String {
    let totals = &statistics.totals;
    let (limit, kind) = statistics.limit_in_force();
    let (limit, what) = match kind {
        LimitKind::Total => (bytes(limit), "limit"),
        LimitKind::Resident => (bytes(limit), "resident limit"),
    };
    let needed = totals.peak_needed_bytes.max(totals.peak_resident_bytes);
    let got = match totals.pages_out {
        0 if needed == 0 => format!("{name} ended before its memory was sampled"),
        0 => format!("{name} needed {}", bytes(needed)),
        _ => format!(
            "{name} needed {} and ran in {} with a pool of {}",
            bytes(needed),
            bytes(totals.peak_resident_bytes),
            bytes(totals.peak_pool_bytes)
        ),
    };
    let kept = if statistics.is_limit_kept() {
        format!("the {what} of {limit} was kept")
    } else {
        let over = bytes(statistics.exceeded_by_bytes);
        let time = match totals.over_limit_ns {
            0..1_000_000 => "for a moment".to_owned(),
            time => format!("for {}", duration(time)),
        };
        let limit = bytes(statistics.exceeded_limit_bytes);
        let held = statistics.programs.held_limit_bytes;
        let held = held.map_or_else(String::new, |held| {
            format!("; --limit {}M would be", held.div_ceil(WHOLE))
        });
        format!("the {what} of {limit} was NOT kept: {over} over it at most, {time}{held}")
    };
    format!("{got}; {kept}")
}

fn time(statistics: &Statistics) -> Option<String> {
    if statistics.totals.pages_out == 0 {
        return None;
    }
    let percent = statistics.swapping_share * 100.0;
    let share = match percent {
        share if share < 1.0 => "less than 1%".to_owned(),
        share => format!("{share:.0}%"),
    };
    let option = statistics.limit_in_force().1.option();
    let suggestion = comfortable(statistics).map_or_else(String::new, |size| {
        format!("; {option} {size} would make it {}", at_most())
    });
    Some(format!(
        "{share} of the time was spent on swapping{suggestion}"
    ))
}

/// The limit that would be comfortable, as options have it, where the one in force is not.
pub fn comfortable(statistics: &Statistics) -> Option<String> {
    let limit = statistics.programs.comfortable_limit_bytes?;
    Some(format!("{}M", limit.div_ceil(WHOLE)))
}

/// The share of swapping that is comfortable.
pub fn at_most() -> String {
    format!("at most {:.0}%", memfold_pager::COMFORTABLE_SHARE * 100.0)
}

/// What went to a store on other machines, and what it failed to do.
fn remote(statistics: &Statistics) -> Option<String> {
    let totals = &statistics.totals;
    if totals.remote_pages_out == 0 && totals.remote_failures == 0 {
        return None;
    }
    let failed = match totals.remote_failures {
        0 => String::new(),
        failures => format!(", {} failures", grouped(failures)),
    };
    Some(format!(
        "the remote store held {} at most: {} pages out, {} in{failed}",
        bytes(totals.peak_remote_bytes),
        grouped(totals.remote_pages_out),
        grouped(totals.remote_pages_in)
    ))
}

/// What is not under the limit, if it is no trifle.
fn beside(statistics: &Statistics) -> Option<String> {
    let (limit, _) = statistics.limit_in_force();
    let trifle = limit / 4;
    let mapped = statistics.totals.peak_mapped_bytes;
    let others = statistics.programs.peak_unmanaged_bytes;
    let mut parts = Vec::new();
    if mapped > trifle {
        parts.push(format!("{} of mapped and shared memory", bytes(mapped)));
    }
    if statistics.processes_unmanaged > 0 {
        let count = statistics.processes_unmanaged;
        let s = if count == 1 { "" } else { "es" };
        parts.push(format!("{count} process{s} with {}", bytes(others)));
    }
    (!parts.is_empty()).then(|| format!("not under the limit: {}", parts.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Programs;
    use memfold_pager::{Stats, Totals};

    const MIB: u64 = 1 << 20;

    fn totals() -> Totals {
        Totals {
            limit_bytes: 128 * MIB,
            resident_limit_bytes: 104 * MIB,
            peak_needed_bytes: 320 * MIB,
            peak_resident_bytes: 126 * MIB,
            peak_pool_bytes: 60 * MIB,
            pages_out: 81_233,
            swap_in_wait_ns: 1_500_000_000,
            first_touch_wait_ns: 120_000_000,
            ..Totals::default()
        }
    }

    #[expect(clippy::large_types_passed_by_value, reason = "each caller makes one")]
    fn lines(totals: Totals, programs: Programs) -> Vec<String> {
        // As little as 4 MiB is tolerated.
        let is_exceeded = totals.over_limit_pages > 1024;
        let stats = Stats {
            totals,
            exceeded_limit_bytes: if is_exceeded { totals.limit_bytes } else { 0 },
            exceeded_by_bytes: totals.over_limit_pages * 4096,
            ..Stats::default()
        };
        let statistics = Statistics::new(&stats, 0.5, 0, programs);
        summary("python3", &statistics, SummaryWhen::Auto)
    }

    fn cpu(seconds: f64) -> Programs {
        Programs {
            program_cpu_seconds: seconds,
            ..Programs::default()
        }
    }

    #[test]
    fn it_says_what_was_needed_and_what_that_cost() {
        let programs = Programs {
            comfortable_limit_bytes: Some(250 * MIB - 7),
            ..cpu(1.0)
        };
        assert_eq!(
            lines(totals(), programs),
            [
                "python3 needed 320 MiB and ran in 126 MiB with a pool of 60.0 MiB; the limit of 128 MiB was \
                 kept",
                "62% of the time was spent on swapping; --limit 250M would make it at most 5%",
            ]
        );
        let little = lines(totals(), cpu(1000.0));
        assert_eq!(little[1], "less than 1% of the time was spent on swapping");
    }

    #[test]
    fn a_limit_that_was_not_kept_is_named_with_its_excess() {
        let over = |pages, time| Totals {
            over_limit_pages: pages,
            over_limit_ns: time,
            ..totals()
        };
        let programs = Programs {
            held_limit_bytes: Some(150 * MIB - 7),
            ..cpu(1.0)
        };
        let line = lines(over(121 * 256, 3_210_000_000), programs).remove(0);
        assert!(
            line.ends_with("the limit of 128 MiB was NOT kept: 121 MiB over it at most, for 3.2 s; --limit 150M would be"),
            "{line}"
        );
        let line = lines(over(5 * 256, 0), cpu(1.0)).remove(0);
        assert!(
            line.ends_with("5.0 MiB over it at most, for a moment"),
            "{line}"
        );
        let line = lines(over(4 * 256, 0), cpu(1.0)).remove(0);
        assert!(line.ends_with("was kept"), "{line}");
    }

    #[test]
    fn a_resident_limit_is_called_so() {
        let totals = Totals {
            limit_bytes: 0,
            ..totals()
        };
        let programs = Programs {
            comfortable_limit_bytes: Some(250 * MIB),
            ..cpu(1.0)
        };
        let lines = lines(totals, programs);
        assert!(lines[0].ends_with("the resident limit of 104 MiB was kept"));
        assert!(lines[1].contains("--resident 250M"), "{lines:?}");
    }

    #[test]
    fn what_is_not_managed_stands_beside_it() {
        let stats = Stats {
            totals: Totals {
                peak_mapped_bytes: 404 * MIB,
                ..totals()
            },
            ..Stats::default()
        };
        let programs = Programs {
            peak_unmanaged_bytes: 12 * MIB,
            ..Programs::default()
        };
        let statistics = Statistics::new(&stats, 0.5, 2, programs);
        assert_eq!(
            summary("sh", &statistics, SummaryWhen::Auto)[2],
            "not under the limit: 404 MiB of mapped and shared memory, 2 processes with 12.0 MiB"
        );
    }

    #[test]
    fn below_the_limit_it_is_silent_unless_asked() {
        let below = Totals {
            pages_out: 0,
            ..totals()
        };
        assert_eq!(lines(below, cpu(1.0)), [""; 0]);
        let stats = Stats {
            totals: below,
            ..Stats::default()
        };
        let statistics = Statistics::new(
            &stats,
            0.5,
            0,
            Programs {
                name: Some("nightly".into()),
                ..cpu(1.0)
            },
        );
        assert_eq!(
            summary("true", &statistics, SummaryWhen::Always),
            ["nightly needed 320 MiB; the limit of 128 MiB was kept"]
        );
        let statistics = Statistics::new(&stats, 0.5, 0, Programs::default());
        assert_eq!(summary("true", &statistics, SummaryWhen::Never), [""; 0]);
        let short = Totals {
            limit_bytes: 128 * MIB,
            ..Totals::default()
        };
        let stats = Stats {
            totals: short,
            ..Stats::default()
        };
        let statistics = Statistics::new(&stats, 0.0, 0, Programs::default());
        assert_eq!(
            summary("true", &statistics, SummaryWhen::Always),
            ["true ended before its memory was sampled; the limit of 128 MiB was kept"]
        );
    }
}
