//! The samples of a run, bounded however long it takes.

use crate::format::name_of;
use std::collections::HashMap;
use std::time::Duration;

/// Samples that are kept, at most: even. More draws finer and takes more memory and a larger file.
const MOST: usize = 1024;
/// Programs whose time is drawn; further ones are counted.
const MOST_PROGRAMS: usize = 200;
/// A program's name is read at each sample until it has been there for this long: it may execute another.
const SETTLED: Duration = Duration::from_millis(500);
/// From then on, the name is read with one in `RENAMED` samples. More costs less and shows a new name later.
const RENAMED: u64 = 32;

/// The state of a run at one time, and its faults since the sample before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sample {
    /// Since the start of the run.
    pub at: Duration,
    /// Resident bytes.
    pub resident: u64,
    /// Bytes of the pool and of metadata.
    pub pool: u64,
    /// Bytes in the swap file.
    pub file: u64,
    /// Bytes in a store on other machines.
    pub remote: u64,
    /// The limit in bytes; 0 if there is none on everything.
    pub limit: u64,
    /// The limit on resident bytes.
    pub resident_limit: u64,
    /// Faults served.
    pub faults: u64,
    /// Median of their latency, in nanoseconds.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
}

impl Sample {
    /// One for both: the larger bytes and p99, all faults, and the median of the one with more of them.
    fn merged(self, later: Sample) -> Sample {
        Sample {
            at: later.at,
            resident: self.resident.max(later.resident),
            pool: self.pool.max(later.pool),
            file: self.file.max(later.file),
            remote: self.remote.max(later.remote),
            limit: later.limit,
            resident_limit: later.resident_limit,
            faults: self.faults + later.faults,
            p50: if self.faults > later.faults {
                self.p50
            } else {
                later.p50
            },
            p99: self.p99.max(later.p99),
        }
    }
}

/// Samples, in the order of time.
#[derive(Debug)]
pub struct Samples {
    list: Vec<Sample>,
    distance: Duration,
    /// The programs of the run.
    pub programs: Programs,
    /// CPU time that the samples took.
    pub cpu: Duration,
}

impl Samples {
    /// None yet, to be this far apart.
    pub fn new(distance: Duration) -> Samples {
        Samples {
            list: Vec::with_capacity(MOST),
            distance,
            programs: Programs::default(),
            cpu: Duration::ZERO,
        }
    }

    /// Adds one.
    pub fn push(&mut self, sample: Sample) {
        if self.list.len() == MOST {
            for pair in 0..MOST / 2 {
                self.list[pair] = self.list[2 * pair].merged(self.list[2 * pair + 1]);
            }
            self.list.truncate(MOST / 2);
            self.distance *= 2;
        }
        self.list.push(sample);
    }

    /// How far apart they are to be.
    pub fn distance(&self) -> Duration {
        self.distance
    }

    /// All of them.
    pub fn all(&self) -> &[Sample] {
        &self.list
    }

    /// The time of the last.
    pub fn end(&self) -> Duration {
        self.list.last().map_or(Duration::ZERO, |sample| sample.at)
    }
}

/// When a program was under the limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Its PID.
    pub pid: i32,
    /// Its name, without control characters.
    pub name: String,
    /// When it was first seen.
    pub from: Duration,
    /// When it was last seen.
    pub until: Duration,
}

/// The programs of a run, as they came and went.
#[derive(Debug, Default)]
pub struct Programs {
    spans: Vec<Span>,
    /// Those that are there, by PID: which span is theirs.
    there: HashMap<i32, Option<usize>>,
    /// Programs without a span.
    uncounted: u64,
    /// How often they were noted.
    notes: u64,
}

impl Programs {
    /// Notes which are there.
    pub fn note(&mut self, at: Duration, pids: impl Iterator<Item = i32>) {
        self.note_named(at, pids, &name_of);
    }

    fn note_named(
        &mut self,
        at: Duration,
        pids: impl Iterator<Item = i32>,
        name_of: &dyn Fn(i32) -> String,
    ) {
        let mut still = HashMap::new();
        self.notes += 1;
        for pid in pids {
            // A program that has just executed another is there twice.
            if still.contains_key(&pid) {
                continue;
            }
            let span = match self.there.remove(&pid) {
                Some(span) => {
                    let is_new = span.is_some_and(|span| self.spans[span].from + SETTLED > at);
                    if let Some(span) =
                        span.filter(|_| is_new || self.notes.is_multiple_of(RENAMED))
                    {
                        let name = name_of(pid);
                        if !name.is_empty() {
                            self.spans[span].name = name;
                        }
                    }
                    span
                }
                None if self.spans.len() < MOST_PROGRAMS => {
                    self.spans.push(Span {
                        pid,
                        name: name_of(pid),
                        from: at,
                        until: at,
                    });
                    Some(self.spans.len() - 1)
                }
                None => {
                    self.uncounted += 1;
                    None
                }
            };
            if let Some(span) = span {
                self.spans[span].until = at;
            }
            still.insert(pid, span);
        }
        self.there = still;
    }

    /// Those that are drawn, in the order in which they came.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.spans.len() as u64 + self.uncounted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_run_of_days_keeps_a_bounded_number_and_loses_no_peak_and_no_fault() {
        let mut samples = Samples::new(at(50));
        let (mut time, mut pushed) = (Duration::ZERO, 0);
        while time < Duration::from_secs(3 * 24 * 3600) {
            let peak = if pushed == 5000 { 77 } else { 1 };
            samples.push(Sample {
                at: time,
                resident: peak,
                faults: 3,
                p99: peak,
                ..Sample::default()
            });
            pushed += 1;
            time += samples.distance();
        }
        let all = samples.all();
        assert!(all.len() <= MOST && all.len() >= MOST / 2);
        assert!(pushed < 20_000, "{pushed}");
        assert_eq!(
            all.iter().map(|sample| sample.faults).sum::<u64>(),
            3 * pushed
        );
        assert_eq!(all.iter().map(|sample| sample.resident).max(), Some(77));
        assert_eq!(all.iter().map(|sample| sample.p99).max(), Some(77));
        assert!(all.windows(2).all(|pair| pair[0].at < pair[1].at));
        assert_eq!(samples.end() + samples.distance(), time);
    }

    #[test]
    fn programs_come_and_go_and_pids_come_again() {
        let mut programs = Programs::default();
        let name = |pid: i32| format!("p{pid}");
        programs.note_named(at(0), [1].into_iter(), &name);
        programs.note_named(at(10), [1, 2, 1].into_iter(), &name);
        programs.note_named(at(20), [2].into_iter(), &name);
        programs.note_named(at(30), [1, 2].into_iter(), &name);
        let seen: Vec<_> = programs
            .spans()
            .iter()
            .map(|span| (span.pid, span.from, span.until))
            .collect();
        let expected = [(1, at(0), at(10)), (2, at(10), at(30)), (1, at(30), at(30))];
        assert_eq!(seen, expected);
        for pid in 100..1000 {
            programs.note_named(at(40), [pid].into_iter(), &name);
        }
        assert_eq!(
            (programs.spans().len(), programs.count()),
            (MOST_PROGRAMS, 903)
        );
    }
}
