//! Timers on the CPU time of programs that rest: a program that computes again ends the governor's wait, so that it need
//! not wake up to see whether one does.
//!
//! What a program can touch unseen depends on the CPU time that it takes. Each gets its part of what all may take, less a
//! tick, after which the kernel looks at its timer. So this is for few programs: of many, each could take a tick at once.

use crate::supervised::space::AddressSpace;
use memfold_sys::alarm::{Alarm, CpuTimer, tick};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

/// The least CPU time for which a timer is set. Less wakes for programs that do hardly anything.
const LEAST: Duration = Duration::from_millis(1);

/// The timers, by address space.
#[derive(Debug, Default)]
pub(super) struct CpuWatch {
    timers: HashMap<u64, CpuTimer>,
}

impl CpuWatch {
    /// Has the alarm ring once these programs may have taken so much CPU time together. `false` if not all of them can be
    /// watched.
    pub(super) fn set(
        &mut self,
        spaces: &[Arc<AddressSpace>],
        alarm: &Alarm,
        time: Duration,
    ) -> bool {
        let held: Vec<_> = spaces.iter().filter(|space| !space.has_left()).collect();
        let is_set = part(time, held.len(), tick()).is_some_and(|part| {
            self.timers
                .retain(|id, _| held.iter().any(|space| space.id == *id));
            held.iter().all(|space| self.set_one(space, alarm, part))
        });
        if !is_set {
            self.timers.clear();
        }
        is_set
    }

    fn set_one(&mut self, space: &AddressSpace, alarm: &Alarm, time: Duration) -> bool {
        // Another process may have its memory.
        if space.is_detached() {
            return false;
        }
        let Some(inspector) = space.inspector() else {
            return false;
        };
        let timer = match self.timers.entry(space.id) {
            Entry::Occupied(held) => held.into_mut(),
            Entry::Vacant(free) => match CpuTimer::new(inspector.process(), alarm) {
                Ok(timer) => free.insert(timer),
                Err(_) => return false,
            },
        };
        timer.set(time).is_ok()
    }
}

/// For how much CPU time the timer of each of so many programs is set, if they may take `time` together.
fn part(time: Duration, programs: usize, tick: Duration) -> Option<Duration> {
    let part = time / u32::try_from(programs.max(1)).ok()?;
    part.checked_sub(tick).filter(|part| *part >= LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_programs_share_what_may_be_taken() {
        let tick = 4 * LEAST;
        let time = 10 * LEAST;
        assert_eq!(part(time, 0, tick), Some(6 * LEAST), "none takes any");
        assert_eq!(part(time, 1, tick), Some(6 * LEAST));
        assert_eq!(part(time, 2, tick), Some(LEAST));
        assert_eq!(part(time, 3, tick), None);
        assert_eq!(part(time, 1, time), None);
    }
}
