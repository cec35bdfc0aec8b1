//! One figure over time.

use crate::report::Samples;

/// More are not compared with each other: a long run's samples are summed up before.
const MOST_POINTS: usize = 400;
const SECONDS_PER_HOUR: f64 = 3600.0;

/// Samples of one figure: when (in seconds), and what.
#[derive(Debug, Default)]
pub struct Series(Vec<(f64, f64)>);

impl Series {
    pub fn push(&mut self, seconds: f64, value: f64) {
        self.0.push((seconds, value));
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn last(&self) -> Option<f64> {
        self.0.last().map(|&(_, value)| value)
    }

    /// What is typical of the first tenth.
    pub fn at_start(&self) -> f64 {
        median(self.0[..self.tenth()].iter().map(|&(_, value)| value))
    }

    /// What is typical of the last tenth.
    pub fn at_end(&self) -> f64 {
        let first = self.0.len() - self.tenth();
        median(self.0[first..].iter().map(|&(_, value)| value))
    }

    fn tenth(&self) -> usize {
        self.0.len().div_ceil(10)
    }

    /// The median slope between all pairs of samples (Theil and Sen): a program that just forks, or
    /// a save that runs at the end, does not tilt it as it would a least-squares line.
    pub fn slope_per_hour(&self) -> f64 {
        let points = self.summed_up();
        let slopes = points.iter().enumerate().flat_map(|(index, one)| {
            let later = points[index + 1..].iter();
            later.map(move |other| (other.1 - one.1) / (other.0 - one.0))
        });
        median(slopes) * SECONDS_PER_HOUR
    }

    /// At most [`MOST_POINTS`], each the medians of as many samples.
    fn summed_up(&self) -> Vec<(f64, f64)> {
        let size = self.0.len().div_ceil(MOST_POINTS).max(1);
        let point = |part: &[(f64, f64)]| {
            let times = median(part.iter().map(|&(seconds, _)| seconds));
            (times, median(part.iter().map(|&(_, value)| value)))
        };
        self.0.chunks(size).map(point).collect()
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut samples = Samples::new();
    values.for_each(|value| samples.push(value));
    samples.median()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(count: usize, value: impl Fn(usize) -> f64) -> Series {
        let mut series = Series::default();
        (0..count).for_each(|second| series.push(second as f64, value(second)));
        series
    }

    #[test]
    fn a_leak_shows_among_outliers() {
        // One more a minute, and every seventh sample sees a fork.
        let fork = |second: usize| if second % 7 == 3 { 40.0 } else { 0.0 };
        let leak = series(600, |second| 20.0 + second as f64 / 60.0 + fork(second));
        let slope = leak.slope_per_hour();
        assert!((59.0..61.0).contains(&slope), "{slope}");
        assert!(leak.at_end() - leak.at_start() > 8.0);
        let constant = series(600, |second| 20.0 + fork(second));
        assert_eq!(constant.slope_per_hour(), 0.0);
        assert_eq!((constant.at_start(), constant.at_end()), (20.0, 20.0));
    }

    #[test]
    fn a_long_run_is_summed_up() {
        let long = series(10_000, |second| second as f64);
        assert!(long.summed_up().len() <= MOST_POINTS);
        assert!((long.slope_per_hour() - SECONDS_PER_HOUR).abs() < 1.0);
    }
}
