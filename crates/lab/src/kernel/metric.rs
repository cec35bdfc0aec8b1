//! The metrics: name, unit, and which direction is better.

/// The direction in which a metric is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    Lower,
    Higher,
}

/// A metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Its name in reports.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// Which direction is better.
    pub better: Better,
    /// Whether it is a resource cost, rather than latency or throughput.
    pub cost: bool,
}

const fn performance(name: &'static str, unit: &'static str, better: Better) -> Metric {
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

/// All metrics, in the order of reports.
pub const METRICS: &[Metric] = &[
    performance("seconds", "s", Better::Lower),
    performance("c_seconds", "s", Better::Lower),
    performance("rust_seconds", "s", Better::Lower),
    performance("munmap_ms", "ms", Better::Lower),
    performance("newcomer_ms", "ms", Better::Lower),
    performance("gone_ms", "ms", Better::Lower),
    performance("free_ms", "ms", Better::Lower),
    performance("throughput_mib_per_s", "MiB/s", Better::Higher),
    performance("operations_per_s", "1/s", Better::Higher),
    performance("requests_per_s", "1/s", Better::Higher),
    performance("requests_pipelined_per_s", "1/s", Better::Higher),
    performance("requests_settled_per_s", "1/s", Better::Higher),
    performance("save_s", "s", Better::Lower),
    performance("save_share", "share", Better::Higher),
    performance("latency_p50_us", "µs", Better::Lower),
    performance("latency_p99_us", "µs", Better::Lower),
    performance("latency_max_us", "µs", Better::Lower),
    performance("fault_p50_us", "µs", Better::Lower),
    performance("fault_p90_us", "µs", Better::Lower),
    performance("fault_p99_us", "µs", Better::Lower),
    cost("faults", ""),
    cost("pages_in", "pages"),
    cost("timed_cpu_ms", "ms"),
    cost("cpu_user_s", "s"),
    cost("cpu_system_s", "s"),
    cost("cpu_supervisor_s", "s"),
    cost("cpu_total_s", "s"),
    cost("peak_resident_mib", "MiB"),
    cost("peak_pool_mib", "MiB"),
    cost("peak_total_mib", "MiB"),
    // Of what the kernel charges, the kinds that memfold's limits count: anonymous memory and pool.
    cost("peak_counted_mib", "MiB"),
    cost("stored_bytes_per_page", "bytes"),
    cost("bytes_per_slot_at_rest", "bytes"),
    cost("bytes_per_slot", "bytes"),
    cost("at_rest_mib", "MiB"),
];

/// The metric of that name.
pub fn find(name: &str) -> Option<&'static Metric> {
    METRICS.iter().find(|metric| metric.name == name)
}

impl Metric {
    /// The ratio of `value` to `reference`, inverted if lower is better: above 1 is better.
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
        assert!(find("unknown").is_none());
    }
}
