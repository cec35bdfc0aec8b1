//! What is measured: names, units, and which way is better.

/// Which way a figure is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    Lower,
    Higher,
}

/// One kind of figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    pub name: &'static str,
    pub unit: &'static str,
    pub better: Better,
    /// What the host pays, rather than what the user feels.
    pub cost: bool,
}

const fn felt(name: &'static str, unit: &'static str, better: Better) -> Metric {
    Metric {
        name,
        unit,
        better,
        cost: false,
    }
}

const fn cost(name: &'static str, unit: &'static str) -> Metric {
    Metric {
        name,
        unit,
        better: Better::Lower,
        cost: true,
    }
}

/// All of them, in the order in which they are shown.
pub const METRICS: &[Metric] = &[
    felt("seconds", "s", Better::Lower),
    felt("c_seconds", "s", Better::Lower),
    felt("rust_seconds", "s", Better::Lower),
    felt("munmap_ms", "ms", Better::Lower),
    felt("newcomer_ms", "ms", Better::Lower),
    felt("gone_ms", "ms", Better::Lower),
    felt("free_ms", "ms", Better::Lower),
    felt("throughput_mib_per_s", "MiB/s", Better::Higher),
    felt("operations_per_s", "1/s", Better::Higher),
    felt("requests_per_s", "1/s", Better::Higher),
    felt("requests_pipelined_per_s", "1/s", Better::Higher),
    felt("requests_settled_per_s", "1/s", Better::Higher),
    felt("save_s", "s", Better::Lower),
    felt("latency_p50_us", "µs", Better::Lower),
    felt("latency_p99_us", "µs", Better::Lower),
    felt("latency_max_us", "µs", Better::Lower),
    cost("timed_cpu_ms", "ms"),
    cost("cpu_user_s", "s"),
    cost("cpu_system_s", "s"),
    cost("cpu_supervisor_s", "s"),
    cost("cpu_total_s", "s"),
    cost("peak_resident_mib", "MiB"),
    cost("peak_pool_mib", "MiB"),
    cost("peak_total_mib", "MiB"),
    cost("stored_bytes_per_page", "bytes"),
    cost("bytes_per_slot_at_rest", "bytes"),
    cost("bytes_per_slot", "bytes"),
    cost("at_rest_mib", "MiB"),
];

/// The metric of a name.
pub fn find(name: &str) -> Option<&'static Metric> {
    METRICS.iter().find(|metric| metric.name == name)
}

impl Metric {
    /// How many times better `value` is than `reference`; above 1 is better.
    pub fn times_better(&self, value: f64, reference: f64) -> f64 {
        match self.better {
            Better::Lower => reference / value,
            Better::Higher => value / reference,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_is_above_one() {
        let time = find("seconds").unwrap();
        let rate = find("requests_per_s").unwrap();
        assert_eq!(time.times_better(1.0, 3.0), 3.0);
        assert_eq!(rate.times_better(1.0, 4.0), 0.25);
        assert!(find("mood").is_none());
    }
}
