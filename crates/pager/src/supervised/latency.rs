//! A lock-free histogram of durations, or of other numbers, with 16 buckets per power of two.

use crate::supervised::stats::FaultLatency;
use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets per power of two. More gives finer percentiles and takes more memory.
const STEPS: usize = 16;
const BUCKETS: usize = 40 * STEPS;

/// A histogram of durations in nanoseconds, with an error of about 6 %. Handlers record, any thread
/// reads; all accesses are Relaxed, so a summary may miss records in flight.
pub(crate) struct Histogram {
    buckets: Vec<AtomicU64>,
    max: AtomicU64,
}

fn bucket(nanoseconds: u64) -> usize {
    if nanoseconds < STEPS as u64 {
        return nanoseconds as usize;
    }
    let power = 63 - nanoseconds.leading_zeros() as usize;
    let step = (nanoseconds >> (power - 4)) as usize & (STEPS - 1);
    ((power - 3) * STEPS + step).min(BUCKETS - 1)
}

fn upper_bound(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let power = bucket / STEPS + 3;
    let step = (bucket % STEPS) as u64;
    ((STEPS as u64 + step + 1) << (power - 4)) - 1
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            max: AtomicU64::new(0),
        }
    }
}

impl Histogram {
    /// Records one duration.
    pub(crate) fn record(&self, nanoseconds: u64) {
        self.buckets[bucket(nanoseconds)].fetch_add(1, Ordering::Relaxed);
        self.max.fetch_max(nanoseconds, Ordering::Relaxed);
    }

    /// The part of the records that is above a value; 0 without any.
    pub(crate) fn part_above(&self, value: u64) -> f64 {
        let count = |buckets: &[AtomicU64]| -> u64 {
            buckets
                .iter()
                .map(|count| count.load(Ordering::Relaxed))
                .sum()
        };
        let above = count(&self.buckets[bucket(value) + 1..]);
        above as f64 / count(&self.buckets).max(1) as f64
    }

    /// The percentiles so far.
    pub(crate) fn summary(&self) -> FaultLatency {
        let counts = self.counts();
        let max = self.max.load(Ordering::Relaxed);
        let percentile = |percent| counts.percentile(percent).min(max);
        FaultLatency {
            p50: percentile(50),
            p90: percentile(90),
            p99: percentile(99),
            max,
        }
    }

    /// The counts so far.
    pub(crate) fn counts(&self) -> LatencyCounts {
        let counts = self.buckets.iter().map(|b| b.load(Ordering::Relaxed));
        LatencyCounts(counts.collect())
    }
}

/// How many faults took how long, for percentiles of a time between two such counts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LatencyCounts(Vec<u64>);

impl LatencyCounts {
    /// What was counted since an earlier one.
    #[must_use]
    pub fn since(&self, earlier: &LatencyCounts) -> LatencyCounts {
        let pairs = self.0.iter().zip(&earlier.0);
        LatencyCounts(pairs.map(|(now, then)| now.saturating_sub(*then)).collect())
    }

    /// Number of faults.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// A percentile in nanoseconds, at most 6 % too large; 0 without a fault.
    pub fn percentile(&self, percent: u64) -> u64 {
        let rank = (self.total() * percent).div_ceil(100);
        let mut cumulative = 0;
        for (index, count) in self.0.iter().enumerate() {
            cumulative += count;
            if cumulative >= rank && rank > 0 {
                return upper_bound(index);
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_a_step() {
        let histogram = Histogram::default();
        assert_eq!(histogram.summary(), FaultLatency::default());
        for nanoseconds in 1..=100_000u64 {
            histogram.record(nanoseconds);
        }
        let summary = histogram.summary();
        for (found, exact) in [
            (summary.p50, 50_000.0),
            (summary.p90, 90_000.0),
            (summary.p99, 99_000.0),
        ] {
            assert!(
                (found as f64 / exact - 1.0).abs() < 0.08,
                "{found} for {exact}"
            );
        }
        assert_eq!(summary.max, 100_000);
        let before = histogram.counts();
        assert_eq!(before.total(), 100_000);
        histogram.record(1_000_000);
        let since = histogram.counts().since(&before);
        assert_eq!(since.total(), 1);
        assert!((1_000_000..1_080_000).contains(&since.percentile(99)));
    }

    #[test]
    fn buckets_cover_their_bounds() {
        for nanoseconds in (0..5000).chain([1 << 20, (1 << 30) + 12345]) {
            assert!(upper_bound(bucket(nanoseconds)) >= nanoseconds);
        }
    }
}
