//! Waiting for another thread to finish with a page.

use memfold_sys::thread::nap;
use std::time::Duration;

/// Waits before another look at a page that another thread is about to finish with: spins first, then
/// yields, then sleeps. `attempt` counts the looks from 0.
pub(super) fn pause(attempt: u32) {
    const SPINS: u32 = 6;
    const YIELDS: u32 = 100;
    const SHORTEST_NAP: Duration = Duration::from_micros(50);
    if attempt < SPINS {
        for _ in 0..1 << attempt {
            std::hint::spin_loop();
        }
    } else if attempt < SPINS + YIELDS {
        // The other thread may need this CPU.
        std::thread::yield_now();
    } else {
        // Yielding alone would keep the CPU from threads of a lower priority.
        nap(SHORTEST_NAP * (1 << (attempt - SPINS - YIELDS).min(2)));
    }
}
