//! Axes: from numbers to places, with round numbers to label.

/// An axis from 0, or from 1 on a logarithmic one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scale {
    /// Up to this number.
    Linear(f64),
    /// Between these powers of ten.
    Powers(i32, i32),
}

impl Scale {
    /// Where a number is, from 0 to 1.
    pub fn place(self, number: f64) -> f64 {
        match self {
            Scale::Linear(most) => (number / most).clamp(0.0, 1.0),
            Scale::Powers(low, high) => {
                let power = number.max(f64::MIN_POSITIVE).log10();
                ((power - f64::from(low)) / f64::from(high - low)).clamp(0.0, 1.0)
            }
        }
    }

    /// A linear one for numbers up to `most`, whose steps are 1, 2 or 5 times a power of `base`'s unit.
    pub fn up_to(most: f64) -> Scale {
        Scale::Linear(most.max(f64::MIN_POSITIVE) * 1.05)
    }

    /// The powers of ten around these positive numbers.
    pub fn around(numbers: impl Iterator<Item = f64>) -> Scale {
        let (mut low, mut high) = (f64::MAX, 1.0_f64);
        for number in numbers.filter(|number| *number > 0.0) {
            low = low.min(number);
            high = high.max(number);
        }
        if low > high {
            return Scale::Powers(3, 6);
        }
        let low = low.log10().floor() as i32;
        Scale::Powers(low, (high.log10().ceil() as i32).max(low + 1))
    }

    /// The numbers to label: about `wanted` on a linear axis, in steps of 1, 2 or 5 times a power of ten
    /// (of two, for bytes).
    pub fn ticks(self, wanted: f64, binary: bool) -> Vec<f64> {
        match self {
            Scale::Powers(low, high) => (low..=high).map(|power| 10_f64.powi(power)).collect(),
            Scale::Linear(most) => {
                let step = step(most / wanted, binary);
                let count = (most / step) as usize;
                (0..=count.min(50)).map(|tick| tick as f64 * step).collect()
            }
        }
    }
}

fn step(least: f64, binary: bool) -> f64 {
    if binary {
        return 2_f64.powf(least.max(1.0).log2().ceil());
    }
    let power = 10_f64.powf(least.max(1e-9).log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let fits = factors.iter().find(|factor| **factor * power >= least);
    fits.unwrap_or(&10.0) * power
}

/// Times to label, in seconds: about `wanted`, in steps that people count in.
pub fn time_ticks(seconds: f64, wanted: f64) -> Vec<f64> {
    const STEPS: [f64; 12] = [
        60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0, 43200.0, 86400.0, 172_800.0,
        604_800.0,
    ];
    let least = seconds / wanted;
    let step = if least <= 30.0 {
        step(least, false)
    } else {
        let fits = STEPS.into_iter().find(|step| *step >= least);
        fits.unwrap_or_else(|| (least / 604_800.0).ceil() * 604_800.0)
    };
    let count = (seconds / step) as usize;
    (0..=count.min(100))
        .map(|tick| tick as f64 * step)
        .collect()
}

/// A time for a label.
pub fn time_label(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        _ if seconds < 60.0 => {
            let text = format!("{seconds:.2}");
            format!("{} s", text.trim_end_matches('0').trim_end_matches('.'))
        }
        60..3600 => format!("{}:{:02} min", whole / 60, whole % 60),
        3600..86400 => format!("{}:{:02} h", whole / 3600, whole / 60 % 60),
        _ => format!("{} d {} h", whole / 86400, whole / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(Scale::Linear(10.5).ticks(5.0, false), [0.0, 5.0, 10.0]);
        let bytes = Scale::Linear(200.0 * 1_048_576.0).ticks(4.0, true);
        assert_eq!(bytes, [0.0, 67_108_864.0, 134_217_728.0, 201_326_592.0]);
        assert_eq!(Scale::around([3e3, 2e6].into_iter()), Scale::Powers(3, 7));
        assert_eq!(Scale::around(std::iter::empty()), Scale::Powers(3, 6));
        assert!((Scale::Powers(3, 5).place(1e4) - 0.5).abs() < 1e-9);
        assert_eq!(time_ticks(2.5, 5.0), [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
        assert_eq!(time_ticks(400.0, 5.0).len(), 4);
        assert_eq!(time_ticks(30.0 * 86400.0, 8.0).len(), 5);
        assert_eq!(time_label(0.5), "0.5 s");
        assert_eq!(time_label(100.0), "1:40 min");
        assert_eq!(time_label(93_600.0), "1 d 2 h");
    }
}
