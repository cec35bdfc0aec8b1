//! `memfold stat --watch`: a line for each run or disk and interval, as vmstat prints them.

use crate::describe::print_to_reader;
use crate::failure::Failure;
use crate::format::{bytes, grouped};
use crate::instance::Instance;
use crate::live::{self, PATIENCE, RunFolder, nothing_runs_as};
use crate::report::Snapshot;
use std::collections::HashMap;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Lines after which the header is repeated on a terminal.
const HEADER_EVERY: usize = 20;

/// Seconds of an interval that are taken for meant where they were given as a PID.
const LONGEST_MEANT: u32 = 600;

/// What is meant by a number behind `--watch` and a space, if it may be a time.
fn every(pid: Option<u32>, interval: Duration) -> String {
    match pid {
        Some(seconds) if interval.as_secs() == 1 && seconds <= LONGEST_MEANT => {
            format!("; every {seconds} seconds is --watch={seconds}")
        }
        _ => String::new(),
    }
}

/// What is watched.
struct Watched {
    pid: Option<u32>,
    /// With a PID: where the statistics come from, once it was found. Others may be stopped and take their time.
    folders: Vec<RunFolder>,
}

impl Watched {
    fn new(pid: Option<u32>) -> Watched {
        let folders = Vec::new();
        Watched { pid, folders }
    }

    fn ask(&mut self) -> Vec<Instance> {
        if !self.folders.is_empty() {
            let ask = |folder: &RunFolder| folder.ask(Instant::now() + PATIENCE).ok();
            return self.folders.iter().filter_map(ask).collect();
        }
        let (folders, found): (Vec<_>, Vec<_>) = live::find(self.pid, PATIENCE).into_iter().unzip();
        if self.pid.is_some() {
            self.folders = folders;
        }
        found
    }

    /// Whether there may be more to show where nothing has answered: what is stopped for a while goes on.
    fn goes_on(&self) -> bool {
        match self.pid {
            Some(_) => self.folders.iter().any(RunFolder::listens),
            None => live::does_any_listen(),
        }
    }
}

/// Prints until no run or disk is left.
pub fn watch(pid: Option<u32>, interval: Duration, json: bool) -> Result<ExitCode, Failure> {
    let mut before: HashMap<u32, Instance> = HashMap::new();
    let mut lines = 0;
    let is_terminal = io::stdout().is_terminal();
    let mut next = Instant::now();
    let mut watched = Watched::new(pid);
    loop {
        let runs = watched.ask();
        if runs.is_empty() && lines == 0 {
            return Err(nothing_runs_as(pid, &every(pid, interval)));
        }
        if runs.is_empty() && !watched.goes_on() {
            return Ok(ExitCode::SUCCESS);
        }
        let mut text = String::new();
        for run in &runs {
            if json {
                let line = serde_json::to_string(run);
                text +=
                    &line.map_err(|error| Failure::own(format!("cannot write JSON: {error}")))?;
                text.push('\n');
            } else {
                if lines == 0 || (is_terminal && lines % HEADER_EVERY == 0) {
                    text += &header();
                }
                text += &line(run, before.get(&run.pid()));
            }
            lines += 1;
        }
        if !print_to_reader(text.as_bytes())? || is_closed(&io::stdout()) {
            return Ok(ExitCode::SUCCESS);
        }
        before = runs.into_iter().map(|run| (run.pid(), run)).collect();
        // A slow answer delays one line, not all that follow.
        next = (next + interval).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// Whether the reader is gone, of whom a pipe reports an error and a socket a hang-up.
fn is_closed(out: &impl AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut sources = [PollFd::new(out, PollFlags::empty())];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let gone = PollFlags::ERR | PollFlags::HUP;
    poll(&mut sources, Some(&now)).is_ok() && sources[0].revents().intersects(gone)
}

fn header() -> String {
    format!(
        "{:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>5}  {}\n",
        "PID", "USED", "LIMIT", "RESIDENT", "POOL", "OUT/s", "IN/s", "FAULTS/s", "SWAP", "COMMAND"
    )
}

/// A run or disk, and what happened since it was last looked at.
fn line(now: &Instance, before: Option<&Instance>) -> String {
    let (used, limit) = now.limit();
    let seconds = before.map_or(0.0, |before| now.uptime_seconds() - before.uptime_seconds());
    let rate = |count: fn(&Instance) -> u64| match before {
        Some(before) if seconds > 0.0 => {
            let change = count(now).saturating_sub(count(before));
            grouped((change as f64 / seconds).round() as u64)
        }
        _ => NONE.to_owned(),
    };
    let (resident, pool, faults, swap) = match now {
        Instance::Run(run) => (
            bytes(run.now.resident_bytes),
            bytes(run.now.pool_bytes),
            rate(faults),
            share(run, before),
        ),
        Instance::Disk(_) => (
            NONE.to_owned(),
            bytes(used),
            NONE.to_owned(),
            NONE.to_owned(),
        ),
    };
    format!(
        "{:>8} {:>9} {:>9} {resident:>9} {pool:>9} {:>9} {:>9} {faults:>8} {swap:>5}  {}\n",
        now.pid(),
        bytes(used),
        bytes(limit),
        rate(Instance::pages_out),
        rate(Instance::pages_in),
        now.title(),
    )
}

/// In a column that does not apply, or is not known yet.
const NONE: &str = "-";

fn faults(instance: &Instance) -> u64 {
    let Instance::Run(run) = instance else {
        return 0;
    };
    run.statistics.faults()
}

/// The part of the time since then that went to swapping.
fn share(run: &Snapshot, before: Option<&Instance>) -> String {
    let Some(Instance::Run(before)) = before else {
        return NONE.to_owned();
    };
    let waited = |run: &Snapshot| run.statistics.waited().as_secs_f64();
    let waited = (waited(run) - waited(before)).max(0.0);
    let cpu = |run: &Snapshot| run.statistics.programs.program_cpu_seconds;
    let time = waited + (cpu(run) - cpu(before)).max(0.0);
    if time > 0.0 {
        format!("{:.0}%", waited / time * 100.0)
    } else {
        "0%".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_behind_a_space_may_be_a_time() {
        let second = Duration::from_secs(1);
        assert!(every(Some(5), second).contains("--watch=5"));
        assert_eq!(every(Some(12_345), second), "");
        assert_eq!(every(Some(5), second * 7), "");
        assert_eq!(every(None, second), "");
    }

    #[test]
    fn a_reader_that_is_gone_is_noticed() {
        let (reading, writing) = io::pipe().unwrap();
        assert!(!is_closed(&writing));
        drop(reading);
        assert!(is_closed(&writing));
        let (reading, writing) = UnixStream::pair().unwrap();
        assert!(!is_closed(&writing));
        drop(reading);
        assert!(is_closed(&writing));
    }

    #[test]
    fn a_pid_is_watched_until_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::bind(folder.path(), live::SOCKET).unwrap();
        let mut watched = Watched::new(Some(7));
        watched.folders = vec![RunFolder::own(folder.path().to_owned())];
        assert!(watched.goes_on(), "it is stopped");
        drop(server);
        assert!(watched.ask().is_empty() && !watched.goes_on());
    }

    use crate::disk_report::{DiskSnapshot, DiskStatistics};
    use crate::live::Server;
    use crate::report::{Programs, Statistics};
    use memfold_disk::DiskUsage;
    use memfold_pager::{Now, Stats, Totals};
    use std::os::unix::net::UnixStream;

    fn run(uptime_seconds: f64, pages_in: u64, cpu: f64) -> Instance {
        let stats = Stats {
            totals: Totals {
                limit_bytes: 64 << 20,
                pages_in,
                swap_in_wait_ns: pages_in * 1_000_000,
                ..Totals::default()
            },
            ..Stats::default()
        };
        let run = Snapshot {
            pid: 7,
            program_pid: 8,
            command: "sort -n".into(),
            uptime_seconds,
            now: Now {
                resident_bytes: 32 << 20,
                ..Now::default()
            },
            programs: Vec::new(),
            statistics: Statistics::new(
                &stats,
                0.0,
                0,
                Programs {
                    program_cpu_seconds: cpu,
                    ..Programs::default()
                },
            ),
        };
        run.into()
    }

    #[test]
    fn rates_are_of_the_interval() {
        let first = run(1.0, 100, 1.0);
        let text = line(&first, None);
        assert!(
            text.contains("32.0 MiB") && text.ends_with(" -  sort -n\n"),
            "{text}"
        );
        let text = line(&run(3.0, 2100, 3.0), Some(&first));
        let fields: Vec<&str> = text.split_whitespace().collect();
        // 2,000 pages in two seconds, two seconds of waiting beside two of CPU time.
        assert!(
            fields.contains(&"1,000") && fields.contains(&"50%"),
            "{text}"
        );
        assert_eq!(header().split_whitespace().count(), 10);
    }

    #[test]
    fn a_disk_has_blocks_a_second_and_no_resident_pages() {
        let disk = |uptime_seconds, blocks: u64| {
            let mut usage = DiskUsage::default();
            usage.used_bytes = 3 << 20;
            usage.limit_bytes = 64 << 20;
            usage.written_bytes = blocks * 4096;
            let statistics = DiskStatistics {
                usage,
                ..DiskStatistics::default()
            };
            Instance::from(DiskSnapshot {
                pid: 9,
                address: "nbd://127.0.0.1:10809".into(),
                uptime_seconds,
                statistics,
                ..DiskSnapshot::default()
            })
        };
        let text = line(&disk(3.0, 2100), Some(&disk(1.0, 100)));
        let fields: Vec<&str> = text.split_whitespace().collect();
        let expected = "9 3.0 MiB 64.0 MiB - 3.0 MiB 1,000 0 - - disk nbd://127.0.0.1:10809";
        assert_eq!(fields.join(" "), expected);
    }
}
