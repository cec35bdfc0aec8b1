//! Latencies of single operations, and their percentiles.

use std::time::Duration;

use super::Figures;

/// Latencies in nanoseconds.
#[derive(Debug)]
pub struct Latencies(Vec<u32>);

impl Latencies {
    /// Capacity for `count`, faulted in now, so that recording does not allocate.
    pub fn for_count(count: usize) -> Self {
        let mut times = vec![1; count];
        times.clear();
        Self(times)
    }

    /// Adds a latency.
    pub fn record(&mut self, time: Duration) {
        self.0
            .push(u32::try_from(time.as_nanos()).unwrap_or(u32::MAX));
    }

    /// Adds p50, p99 and maximum in microseconds to `figures`.
    pub fn add_to(mut self, figures: Figures) -> Figures {
        self.0.sort_unstable();
        let at = |part: f64| {
            let place = (self.0.len() as f64 * part) as usize;
            let time = self.0.get(place.min(self.0.len().saturating_sub(1)));
            time.map_or(f64::NAN, |nanoseconds| f64::from(*nanoseconds) / 1000.0)
        };
        figures
            .with("latency_p50_us", at(0.5))
            .with("latency_p99_us", at(0.99))
            .with("latency_max_us", at(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_sorted_times() {
        let mut times = Latencies::for_count(1000);
        for number in (1..=1000_u64).rev() {
            times.record(Duration::from_micros(number));
        }
        let figures = times.add_to(Figures::default());
        assert_eq!(figures.get("latency_p50_us"), Some(501.0));
        assert_eq!(figures.get("latency_p99_us"), Some(991.0));
        assert_eq!(figures.get("latency_max_us"), Some(1000.0));
    }
}
