//! Proactive reclaim: what stays cold leaves though the limit has room for it.
//!
//! The idea is that of senpai (<https://github.com/facebookincubator/senpai>), which lowers a cgroup's limit
//! until its programs feel it. Here no limit is lowered: each second in which programs hardly waited for
//! memory, a small part of what is resident may leave, the coldest first as always. When they wait, nothing
//! more leaves for a while. Programs that grow are left alone, as first touches cost more in managed memory.

use crate::supervised::group::Group;
use crate::time::Instant;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Time of one step. Shorter steps see refaults later than they were caused.
const STEP: Duration = Duration::from_secs(1);
/// Share of a step that programs may wait for memory and count as undisturbed: 1/n. A larger divisor gives
/// back less memory and disturbs less.
const CALM_DIVISOR: u64 = 200;
/// Share of a step, 1/n, from which on programs feel it, and are left alone for a pause.
const FELT_DIVISOR: u64 = 80;
/// Shares of the resident memory that leave in one step, 1/n: at first, and after steps without any wait.
const FIRST_DIVISOR: u64 = 64;
const LAST_DIVISOR: u64 = 16;
/// Growth in one step, as a share 1/n of what is resident, that counts as growing.
const GROWTH_DIVISOR: u64 = 32;
/// Of what programs need, resident and out, this share 1/n stays: a program that goes on after a long sleep
/// finds some of it.
const KEPT_DIVISOR: u64 = 4;
/// Bytes below which nothing leaves.
const LEAST: u64 = 8 << 20;
/// Steps of the pause after programs felt it: the first, and the longest of those that follow one another.
const PAUSES: (u32, u32) = (4, 64);

/// What is seen in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    /// Time that all faults together waited, and length of the step, in nanoseconds.
    waited: u64,
    step: u64,
    /// Resident bytes, and resident and swapped-out bytes.
    resident: u64,
    needed: u64,
}

/// The controller. The governor's alone.
#[derive(Debug)]
pub(crate) struct Proactive {
    last: Instant,
    /// Waits until `last`, in nanoseconds.
    waited: u64,
    steps: Steps,
}

/// What follows from one step for the next.
#[derive(Debug)]
struct Steps {
    /// Resident bytes at the last one.
    resident: u64,
    divisor: u64,
    /// Steps of the current pause that are left, and length of the last pause.
    pause: u32,
    last_pause: u32,
}

impl Default for Steps {
    fn default() -> Steps {
        Steps {
            resident: 0,
            divisor: FIRST_DIVISOR,
            pause: 0,
            last_pause: 0,
        }
    }
}

impl Steps {
    /// Resident bytes down to which memory is to be reclaimed in the next step.
    fn target(&mut self, seen: Seen) -> Option<u64> {
        let before = std::mem::replace(&mut self.resident, seen.resident);
        if seen.waited > seen.step / FELT_DIVISOR {
            let (first, longest) = PAUSES;
            self.pause = (2 * self.last_pause).clamp(first, longest);
            self.last_pause = self.pause;
            self.divisor = FIRST_DIVISOR;
            return None;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        let is_growing = seen.resident > before + before / GROWTH_DIVISOR;
        if is_growing || seen.waited > seen.step / CALM_DIVISOR {
            return None;
        }
        let least = LEAST.max(seen.needed / KEPT_DIVISOR);
        let target = seen.resident - seen.resident / self.divisor;
        if seen.waited == 0 {
            self.divisor = (self.divisor / 2).max(LAST_DIVISOR);
        } else {
            self.divisor = FIRST_DIVISOR;
            // It was not felt.
            self.last_pause = self.last_pause.saturating_sub(1);
        }
        (target >= least).then_some(target)
    }
}

impl Proactive {
    /// A controller that begins now.
    pub(crate) fn new() -> Proactive {
        Proactive {
            last: Instant::now(),
            waited: 0,
            steps: Steps::default(),
        }
    }

    /// Sets the group's target anew if a step is over.
    pub(crate) fn update(&mut self, group: &Group) {
        let step = self.last.elapsed();
        if step < STEP {
            return;
        }
        self.last = Instant::now();
        let resources = &group.resources;
        let counters = &resources.counters;
        let waited = counters.swap_in_wait_ns.load(Ordering::Relaxed)
            + counters.first_touch_wait_ns.load(Ordering::Relaxed);
        let resident = resources.resident_bytes();
        let seen = Seen {
            waited: waited - std::mem::replace(&mut self.waited, waited),
            step: step.as_nanos() as u64,
            resident,
            needed: resident + crate::page::bytes(resources.swap.usage().stored_pages),
        };
        resources.set_proactive_target(self.steps.target(seen));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn seen(waited_ms: u64, resident: u64, needed: u64) -> Seen {
        Seen {
            waited: waited_ms * 1_000_000,
            step: 1_000_000_000,
            resident: resident * MIB,
            needed: needed * MIB,
        }
    }

    #[test]
    fn what_no_fault_waits_for_leaves_faster_and_faster() {
        let mut steps = Steps::default();
        assert_eq!(steps.target(seen(0, 256, 256)), None, "it has just grown");
        let targets: Vec<_> = (0..4)
            .map(|_| steps.target(seen(0, 256, 256)).unwrap() / MIB)
            .collect();
        assert_eq!(targets, [252, 248, 240, 240]);
        assert_eq!(steps.target(seen(1, 256, 256)).unwrap() / MIB, 240);
        assert_eq!(steps.target(seen(1, 256, 256)).unwrap() / MIB, 252);
    }

    #[test]
    fn waits_pause_it_longer_each_time() {
        let mut steps = Steps {
            resident: 256 * MIB,
            ..Steps::default()
        };
        for pause in [4, 8, 16] {
            assert_eq!(steps.target(seen(20, 256, 256)), None);
            for _ in 0..pause {
                assert_eq!(steps.target(seen(0, 256, 256)), None);
            }
            assert!(steps.target(seen(0, 256, 256)).is_some());
        }
        assert_eq!(
            steps.target(seen(8, 256, 256)),
            None,
            "neither calm nor felt"
        );
        assert!(steps.target(seen(4, 256, 256)).is_some());
    }

    #[test]
    fn growing_programs_and_the_last_quarter_stay() {
        let mut steps = Steps {
            resident: 256 * MIB,
            ..Steps::default()
        };
        assert_eq!(steps.target(seen(0, 280, 280)), None);
        assert!(steps.target(seen(0, 281, 281)).is_some());
        assert_eq!(steps.target(seen(0, 65, 256)), None);
        assert_eq!(steps.target(seen(0, 8, 8)), None);
    }
}
