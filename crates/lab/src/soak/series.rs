//! One counter over time.

use crate::report::Samples;

/// Most points that the slope is computed from; the work is quadratic in it. In a long run each
/// point covers more samples.
const MOST_POINTS: usize = 400;
const SECONDS_PER_HOUR: f64 = 3600.0;

/// Samples of one counter: time in seconds, and value.
#[derive(Debug, Default)]
pub struct Series(Vec<(f64, f64)>);

impl Series {
    /// Adds a sample.
    pub fn push(&mut self, seconds: f64, value: f64) {
        self.0.push((seconds, value));
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The latest value.
    pub fn last(&self) -> Option<f64> {
        self.0.last().map(|&(_, value)| value)
    }

    /// The minimum of the first tenth.
    pub fn at_start(&self) -> f64 {
        least(&self.0[..self.tenth()])
    }

    /// The minimum of the last tenth.
    pub fn at_end(&self) -> f64 {
        least(&self.0[self.0.len() - self.tenth()..])
    }

    /// The largest sample over the smallest.
    pub fn spread(&self) -> f64 {
        let values = self.0.iter().map(|&(_, value)| value);
        values.collect::<Samples>().spread()
    }

    fn tenth(&self) -> usize {
        self.0.len().div_ceil(10)
    }

    /// The Theil-Sen slope: the median slope of all pairs of points, which some outliers do not
    /// tilt.
    pub fn slope_per_hour(&self) -> f64 {
        let points = self.points();
        let slopes = points.iter().enumerate().flat_map(|(index, one)| {
            let later = points[index + 1..].iter();
            later.map(move |other| (other.1 - one.1) / (other.0 - one.0))
        });
        median(slopes) * SECONDS_PER_HOUR
    }

    /// At most [`MOST_POINTS`], each the minimum of as many samples.
    fn points(&self) -> Vec<(f64, f64)> {
        let size = self.0.len().div_ceil(MOST_POINTS).max(1);
        let point = |part: &[(f64, f64)]| {
            let times = median(part.iter().map(|&(seconds, _)| seconds));
            (times, least(part))
        };
        // A shorter remainder is dropped: its minimum would be biased.
        self.0.chunks_exact(size).map(point).collect()
    }
}

fn least(samples: &[(f64, f64)]) -> f64 {
    let values = samples.iter().map(|&(_, value)| value);
    values.fold(f64::INFINITY, f64::min)
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
        // One more a minute, and a program that exits late in one rest of eight.
        let late = |second: usize| if second.is_multiple_of(8) { 40.0 } else { 0.0 };
        let leak = series(600, |second| 20.0 + second as f64 / 60.0 + late(second));
        let slope = leak.slope_per_hour();
        assert!((59.0..61.0).contains(&slope), "{slope}");
        assert!(leak.at_end() - leak.at_start() > 8.0);
        let constant = series(600, |second| 20.0 + late(second));
        assert_eq!(constant.slope_per_hour(), 0.0);
        assert_eq!((constant.at_start(), constant.at_end()), (20.0, 20.0));
    }

    #[test]
    fn a_long_run_is_reduced_to_a_bounded_number_of_points() {
        let long = series(10_000, |second| second as f64);
        assert!(long.points().len() <= MOST_POINTS);
        assert!((long.slope_per_hour() - SECONDS_PER_HOUR).abs() < 1.0);
    }
}
