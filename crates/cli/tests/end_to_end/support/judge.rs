//! Whether what was sampled held a limit.

use super::tree::Sample;
use std::cmp::Reverse;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Runs of all tests together that may need an excuse. More show a fault of memfold's, or a machine
/// that is no place for these tests.
const MOST_EXCUSED: usize = 4;

/// What became of a limit.
#[derive(Clone, Copy, Debug)]
pub enum Verdict {
    Held,
    /// `over` bytes more than allowed, which a pause of the machine explains.
    Excused {
        over: u64,
    },
    /// `samples` samples show at least `held`.
    Outgrown {
        held: Sample,
        samples: usize,
    },
}

/// By how much more than `samples` samples may show that a program outgrew its limit while no thread
/// could run.
struct Outgrown {
    samples: usize,
    /// A pause that is made up for.
    short: Duration,
    bytes_a_nanosecond: u64,
}

/// At the very peak, threads that do nothing but touch new memory, as fast as the supervisor reckons
/// with. It leaves room for two milliseconds of that. Later, when most of it has been moved out, what
/// a program touches on a machine that is overloaded, not only busy.
const OUTGROWN: [Outgrown; 2] = [
    Outgrown {
        samples: 0,
        short: Duration::from_millis(2),
        bytes_a_nanosecond: 8,
    },
    Outgrown {
        samples: 20,
        short: Duration::from_millis(10),
        bytes_a_nanosecond: 2,
    },
];

impl Outgrown {
    /// Bytes that a program may touch in a pause.
    fn touched_in(&self, pause: Duration) -> u64 {
        let nanoseconds = pause.saturating_sub(self.short).as_nanos() as u64;
        nanoseconds.saturating_mul(self.bytes_a_nanosecond)
    }
}

/// Compares the samples' sizes with what is allowed. A pause of the machine excuses no more than the
/// limit once again.
pub fn judge(
    samples: &[Sample],
    size: impl Fn(&Sample) -> u64,
    limit: u64,
    allowed: u64,
    pause: Duration,
) -> Verdict {
    let mut most_over = 0;
    for outgrown in OUTGROWN {
        let held = most_held(samples, outgrown.samples, &size);
        let over = size(&held).saturating_sub(allowed);
        if over > outgrown.touched_in(pause).min(limit) {
            let samples = outgrown.samples + 1;
            return Verdict::Outgrown { held, samples };
        }
        most_over = most_over.max(over);
    }
    match most_over {
        0 => Verdict::Held,
        over => Verdict::Excused { over },
    }
}

/// The sample with the largest of these sizes, but for `but_for` of them.
pub fn most_held(samples: &[Sample], but_for: usize, size: impl Fn(&Sample) -> u64) -> Sample {
    let mut samples = samples.to_vec();
    samples.sort_by_key(|sample| Reverse(size(sample)));
    samples.get(but_for).copied().unwrap_or_default()
}

/// Counts a run that outgrew its limit with an excuse; fails when there are too many of them.
#[track_caller]
pub fn note_excuse(why: &str) {
    static EXCUSED: AtomicUsize = AtomicUsize::new(0);
    let count = EXCUSED.fetch_add(1, Ordering::Relaxed) + 1;
    eprintln!("excused {count} of at most {MOST_EXCUSED} runs: {why}");
    assert!(
        count <= MOST_EXCUSED,
        "{count} runs outgrew their limit while the machine was too busy, the last one {why}"
    );
}
