//! Host parameters that a report records beside its figures.

use serde_json::{Value, json};

use super::read;

/// Host parameters that affect swap.
#[derive(Debug)]
pub struct Facts;

impl Facts {
    /// Reads them, as JSON; null for a parameter that the host lacks.
    pub fn now() -> Value {
        let text = |path: &str| read(path).ok();
        let memory = read("/proc/meminfo").ok().and_then(|meminfo| {
            let line = meminfo.lines().next()?.strip_prefix("MemTotal:")?;
            line.trim().trim_end_matches(" kB").parse::<u64>().ok()
        });
        json!({
            "kernel": text("/proc/sys/kernel/osrelease"),
            "cpus": std::thread::available_parallelism().map_or(1, usize::from),
            "memory_mebibytes": memory.map(|kib| kib / 1024),
            "page_cluster": text("/proc/sys/vm/page-cluster"),
            "swappiness": text("/proc/sys/vm/swappiness"),
            "transparent_hugepage": text("/sys/kernel/mm/transparent_hugepage/enabled"),
            "multigenerational_lru": text("/sys/kernel/mm/lru_gen/enabled"),
            "load_average": text("/proc/loadavg"),
        })
    }
}
