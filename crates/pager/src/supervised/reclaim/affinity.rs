//! CPU affinity of the governor and the reclaimer: away from the CPUs where programs fault.
//!
//! A thread that waits for a fault leaves its CPU for some microseconds. The handler runs there, and
//! after it any queued thread, for a whole time slice: many times the duration of the fault. The
//! scheduler does not always use other idle CPUs, because a program that sleeps at each fault makes its
//! CPU look half idle.

use crate::supervised::group::Group;
use crate::sync::lock;
use crate::time::Instant;
use memfold_sys::thread;
use std::time::Duration;

/// Interval at which the CPUs are chosen. Longer costs less and follows migrating programs later.
const INTERVAL: Duration = Duration::from_millis(10);

/// The affinity of one thread, which owns it.
#[derive(Debug)]
pub(crate) struct AffinityFollower {
    /// All allowed CPUs, in the order of the handlers.
    allowed: Vec<usize>,
    /// The current affinity.
    chosen: Vec<usize>,
    /// Time of the last choice.
    updated: Instant,
}

impl AffinityFollower {
    /// The affinity of the calling thread.
    pub(crate) fn new() -> AffinityFollower {
        let allowed = thread::allowed_cpus();
        AffinityFollower {
            chosen: allowed.clone(),
            allowed,
            updated: Instant::now(),
        }
    }

    /// Moves the calling thread, for which this was created, to CPUs without a listening handler, if
    /// there are any. While faults wait for room, programs wait for this thread, and it may run on any
    /// CPU.
    pub(crate) fn follow(&mut self, group: &Group) {
        if self.updated.elapsed() < INTERVAL {
            return;
        }
        self.updated = Instant::now();
        let chosen = self.choose(&self.listening_handlers(group), !group.deferred.is_empty());
        if chosen != self.chosen {
            // Failure costs latency only.
            let _ = thread::run_on(&chosen);
            self.chosen = chosen;
        }
    }

    /// The numbers of the handlers that listen to programs.
    fn listening_handlers(&self, group: &Group) -> Vec<usize> {
        let mut numbers = Vec::new();
        for space in group.spaces() {
            for number in lock(&space.listeners).listeners() {
                if !numbers.contains(&number) {
                    numbers.push(number);
                }
            }
            if numbers.len() >= self.allowed.len() {
                break;
            }
        }
        numbers
    }

    fn choose(&self, listening: &[usize], faults_wait: bool) -> Vec<usize> {
        let is_free = |(number, _): &(usize, &usize)| !listening.contains(number);
        let free: Vec<usize> = self
            .allowed
            .iter()
            .enumerate()
            .filter(is_free)
            .map(|(_, cpu)| *cpu)
            .collect();
        if faults_wait || free.is_empty() {
            return self.allowed.clone();
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_avoid_cpus_with_faults_while_others_are_free() {
        let affinity = AffinityFollower {
            allowed: vec![2, 3, 8],
            chosen: vec![2, 3, 8],
            updated: Instant::now(),
        };
        assert_eq!(affinity.choose(&[], false), [2, 3, 8]);
        assert_eq!(affinity.choose(&[1], false), [2, 8]);
        assert_eq!(affinity.choose(&[2, 0], false), [3]);
        assert_eq!(affinity.choose(&[0, 1, 2], false), [2, 3, 8]);
        assert_eq!(affinity.choose(&[1], true), [2, 3, 8]);
    }
}
