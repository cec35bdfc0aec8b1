//! What the machine as a whole does: one read, however many processes there are.

use crate::process::proc_text;
use crate::thread;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// The kernel shows the idle time of all CPUs in units of this.
const UNIT: Duration = Duration::from_millis(10);
/// An idle machine's overhead, as a part of one CPU: wake-ups are accounted to no task. A smaller value, which allows for
/// more of it, hides more of others' CPU time.
const OVERHEAD: u32 = 50;

/// Tells how much CPU time others than this process took, by how long the CPUs were idle. Waits for devices count as
/// work, so it may tell too much. Where the kernel counts idle time by ticks, work between two of these is not told.
#[derive(Debug)]
pub struct OtherWork {
    uptime: File,
}

/// The idle time at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Idle {
    at: Instant,
    cpus: u32,
    total: Duration,
    own: Duration,
}

impl Idle {
    /// Time since that moment.
    pub fn elapsed(&self) -> Duration {
        self.at.elapsed()
    }
}

impl OtherWork {
    /// Opens the kernel's counters.
    ///
    /// # Errors
    /// If they cannot be opened.
    pub fn open() -> io::Result<OtherWork> {
        let uptime = File::open("/proc/uptime")?;
        Ok(OtherWork { uptime })
    }

    /// The idle time until now.
    ///
    /// # Errors
    /// If the kernel's counters cannot be read, or are none.
    pub fn now(&self) -> io::Result<Idle> {
        let cpus = proc_text("/sys/devices/system/cpu/online")?;
        let cpus = cpus_of(cpus.trim_end()).ok_or(io::ErrorKind::InvalidData)?;
        self.read(cpus)
    }

    /// CPU time that others took since then, within 10 ms; `None` if that is not known, as CPUs came or what shows the
    /// counters is not the kernel.
    pub fn since(&self, then: &Idle) -> Option<Duration> {
        let now = self.read(then.cpus).ok()?;
        let all = now.at.duration_since(then.at) * then.cpus;
        let idle = now.total.checked_sub(then.total)?;
        if idle > all + UNIT * 2 {
            return None;
        }
        let own = now.own.saturating_sub(then.own);
        Some(all.saturating_sub(idle).saturating_sub(own))
    }

    /// Whether others took no time since then, as far as that can be told: a hundredth of a second may be missed, and
    /// 1/50 of a CPU.
    pub fn none_since(&self, then: &Idle) -> bool {
        let worked = self.since(then);
        worked.is_some_and(|worked| worked < UNIT + then.elapsed() / OVERHEAD)
    }

    fn read(&self, cpus: u32) -> io::Result<Idle> {
        let mut bytes = [0; 64];
        let read = self.uptime.read_at(&mut bytes, 0)?;
        let at = Instant::now();
        let own = thread::cpu_time_of_all();
        let text = std::str::from_utf8(&bytes[..read]).unwrap_or_default();
        let idle = idle_of(text).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Idle {
            at,
            cpus,
            total: idle,
            own,
        })
    }
}

/// Free memory of the machine in bytes, without what the kernel keeps for each CPU.
pub fn free_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    (info.freeram as u64).saturating_mul(info.mem_unit.into())
}

/// The second figure of `12.34 56.78\n`.
fn idle_of(uptime: &str) -> Option<Duration> {
    let (_, idle) = uptime.trim_end().split_once(' ')?;
    let (seconds, hundredths) = idle.split_once('.')?;
    let seconds = Duration::from_secs(seconds.parse().ok()?);
    let hundredths: u32 = hundredths.parse().ok()?;
    seconds.checked_add(UNIT.checked_mul(hundredths)?)
}

/// How many CPUs a list like `0,2-3` has.
fn cpus_of(list: &str) -> Option<u32> {
    list.split(',').try_fold(0u32, |sum, part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        let cpus = last.checked_sub(first)?.checked_add(1)?;
        sum.checked_add(cpus)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::stat_field;

    #[test]
    fn the_kernels_counters_are_understood() {
        assert_eq!(
            idle_of("86000.12 171234.56\n"),
            Some(Duration::from_millis(171_234_560))
        );
        for none in ["", "1.2", "1.2 ", "1.2 3", "1.2 .5", "1.2 3.x", "1.2 3.-1"] {
            assert_eq!(idle_of(none), None, "{none}");
        }
        assert_eq!(cpus_of("0"), Some(1));
        assert_eq!(cpus_of("0-1"), Some(2));
        assert_eq!(cpus_of("0,2-3,8"), Some(4));
        for none in ["", "3-1", "a", "0-", "0,,1", "0-4294967295"] {
            assert_eq!(cpus_of(none), None, "{none}");
        }
    }

    #[test]
    fn free_memory_is_part_of_the_machines() {
        let total = rustix::system::sysinfo();
        let total = total.totalram as u64 * u64::from(total.mem_unit);
        let free = free_bytes();
        assert!(free > 0 && free < total, "{free} of {total}");
    }

    #[test]
    fn work_of_others_is_seen() {
        let others = OtherWork::open().unwrap();
        let then = others.now().unwrap();
        let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let mut child = std::process::Command::new("sh")
            .args(["-c", script])
            .spawn()
            .unwrap();
        let worked = |child: &mut std::process::Child| {
            let stat = proc_text(&format!("/proc/{}/stat", child.id())).ok()?;
            stat_field::<u64>(&stat, 14)
        };
        let began = Instant::now();
        // Ten hundredths of a second.
        while worked(&mut child).is_some_and(|ticks| ticks < 10) && began.elapsed().as_secs() < 60 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let seen = others.since(&then);
        child.kill().unwrap();
        child.wait().unwrap();
        // Ticks are shown in whole.
        assert!(
            seen.is_none_or(|seen| seen > Duration::from_millis(70)),
            "{seen:?}"
        );
    }
}
