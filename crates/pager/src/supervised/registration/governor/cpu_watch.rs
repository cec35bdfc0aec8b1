//! Timers on the CPU time of programs that rest: a program that computes again ends the governor's wait, so that it need
//! not wake up to see whether one does.
//!
//! What a program can touch unseen depends on the CPU time that it takes. Each gets its part of what all may take, less a
//! tick, after which the kernel looks at its timer. So this is for few programs: of many, each could take a tick at once.

use crate::supervised::space::AddressSpace;
use memfold_sys::alarm::{Alarm, CpuTimer, tick};
use memfold_sys::process::Process;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

/// The least CPU time until a timer expires. Less wakes for programs that do hardly anything.
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
        // Another process may have the memory of one that is detached.
        let inspected = held.iter().map(|space| {
            let inspector = space.inspector().filter(|_| !space.is_detached())?;
            Some((space.id, inspector))
        });
        let watched = part(time, held.len(), tick()).zip(inspected.collect::<Option<Vec<_>>>());
        let is_set = watched.is_some_and(|(part, inspected)| {
            self.timers
                .retain(|timed, _| inspected.iter().any(|(id, _)| id == timed));
            let mut each = inspected.iter();
            each.all(|(id, inspector)| self.set_one(*id, inspector.process(), alarm, part))
        });
        if !is_set {
            self.timers.clear();
        }
        is_set
    }

    fn set_one(&mut self, id: u64, process: &Process, alarm: &Alarm, time: Duration) -> bool {
        let timer = match self.timers.entry(id) {
            Entry::Occupied(held) => held.into_mut(),
            Entry::Vacant(free) => match CpuTimer::new(process, alarm) {
                Ok(timer) => free.insert(timer),
                Err(_) => return false,
            },
        };
        timer.set(time).is_ok()
    }
}

/// The initial expiration of each program's timer: an equal share of `time`, less a tick. `None` below [`LEAST`].
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
