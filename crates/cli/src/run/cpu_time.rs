//! What memfold itself costs, and what its programs do.

use memfold_sys::process::{Process, below, proc_text};
use memfold_sys::thread;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

/// CPU time of this process in seconds: user and system time of all its threads.
pub fn cpu_seconds() -> f64 {
    thread::cpu_time_of_all().as_secs_f64()
}

/// CPU time of the programs, user and system: of those that ended and were waited for, and of these
/// processes, which go on.
pub fn of_programs(living: &[i32]) -> Duration {
    let ended = getrusage(UsageWho::RUSAGE_CHILDREN).map_or(Duration::ZERO, |usage| {
        duration(usage.user_time()) + duration(usage.system_time())
    });
    let living: Duration = living.iter().filter_map(|pid| of_process(*pid)).sum();
    ended + living
}

fn duration(time: TimeVal) -> Duration {
    let micros = time.tv_sec() * 1_000_000 + time.tv_usec();
    Duration::from_micros(micros.max(0) as u64)
}

/// Of a process and of those of its children that it waited for.
fn of_process(pid: i32) -> Option<Duration> {
    in_stat(&proc_text(&format!("/proc/{pid}/stat")).ok()?)
}

/// The same, by the text of its `stat`.
fn in_stat(text: &str) -> Option<Duration> {
    // The name before may hold anything.
    let (_, fields) = text.rsplit_once(") ")?;
    let ticks = fields.split(' ').skip(11).take(4);
    let ticks: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
    let a_second = rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_secs_f64(ticks as f64 / a_second as f64))
}

/// CPU time of a program, and of all that it started, since it was attached. memfold is not its parent: what the kernel
/// has of it is gone once its parent has waited for it.
pub struct SinceAttached {
    process: Arc<Process>,
    /// What was spent before.
    before: Duration,
    /// The last known of the program itself.
    own: Cell<Duration>,
    /// The most that was known of all.
    most: Cell<Duration>,
}

impl SinceAttached {
    /// From now on: to be called before the program is attached.
    pub fn new(process: Arc<Process>) -> SinceAttached {
        let mut since = SinceAttached {
            process,
            before: Duration::ZERO,
            own: Cell::default(),
            most: Cell::default(),
        };
        since.before = since.of_all(&[]);
        since
    }

    /// Until now. `managed` are processes under the limit, which have another parent once the program has ended.
    pub fn spent(&self, managed: &[i32]) -> Duration {
        let spent = self.of_all(managed).saturating_sub(self.before);
        // The time of children that were not waited for is gone.
        let most = self.most.get().max(spent);
        self.most.set(most);
        most
    }

    fn of_all(&self, managed: &[i32]) -> Duration {
        let own = self.process.text("stat").ok();
        if let Some(own) = own.as_deref().and_then(in_stat) {
            self.own.set(own);
        }
        let children = self.process.children();
        let mut others: Vec<i32> = children.iter().flat_map(|child| below(*child)).collect();
        others.extend(children.iter().chain(managed));
        others.sort_unstable();
        others.dedup();
        others.retain(|pid| *pid != self.process.pid());
        let others: Duration = others.into_iter().filter_map(of_process).sum();
        self.own.get() + others
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const WORK: &str = "work() { i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; }; ";

    #[test]
    fn what_an_attached_program_took_before_is_left_out() {
        let script =
            format!("{WORK} work; echo; read x; work & wait; (work; echo; read x); read x");
        let mut child = Command::new("sh")
            .args(["-c", &script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        let mut await_line = || std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        await_line();
        let process = Arc::new(Process::open(child.id() as i32).unwrap());
        let whole = of_process(process.pid()).unwrap();
        let since = SinceAttached::new(process);
        assert!(whole > Duration::from_millis(20), "{whole:?}");
        let nothing = since.spent(&[]);
        assert!(nothing < Duration::from_millis(20), "{nothing:?}");
        // Of a child that was waited for and of one that lives.
        std::io::Write::write_all(&mut input, b"\n").unwrap();
        await_line();
        let both = since.spent(&[]);
        assert!(both > whole, "{both:?} after {whole:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(since.spent(&[]) >= both);
    }

    #[test]
    fn what_programs_take_is_counted_while_they_live_and_afterwards() {
        let script = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo done; read x";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        let living = of_programs(&[child.id() as i32]);
        assert!(living > Duration::from_millis(20), "{living:?}");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(of_programs(&[]) + Duration::from_millis(20) >= living);
    }
}
