//! The sizes at which reclaim starts, stops, and becomes urgent.

/// Watermarks in resident bytes (not in free pages, as in the kernel): `exceeded > hard > pressing >
/// start > stop`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watermarks {
    /// Above this programs yield their CPUs to the reclaimer.
    pub exceeded: u64,
    /// The limit; faults that need room wait above it.
    pub hard: u64,
    /// Above this the reclaimer no longer yields its CPU to programs.
    pub pressing: u64,
    /// Background reclaim starts above this.
    pub start: u64,
    /// Background reclaim stops below this.
    pub stop: u64,
}

impl Watermarks {
    /// The watermarks for a resident limit in bytes. A larger distance reclaims in longer bursts and
    /// keeps less resident.
    pub(crate) fn of(limit: u64) -> Watermarks {
        let distance = (limit / 128).clamp(512 << 10, 32 << 20).min(limit / 4);
        Watermarks {
            exceeded: limit + distance,
            hard: limit,
            pressing: limit - distance / 4,
            start: limit - distance,
            stop: limit - 2 * distance,
        }
    }

    /// The same, with reclaim down to so many bytes at least. Faults wait for room at the same size.
    pub(crate) fn lowered_to(self, target: u64) -> Watermarks {
        Watermarks {
            start: self.start.min(target),
            stop: self.stop.min(target),
            ..self
        }
    }
}
