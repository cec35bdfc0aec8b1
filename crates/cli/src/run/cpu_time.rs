//! What memfold itself costs, and what its programs do.

use memfold_sys::process::proc_text;
use memfold_sys::thread;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
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
    let text = proc_text(&format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold anything.
    let (_, fields) = text.rsplit_once(") ")?;
    let ticks = fields.split(' ').skip(11).take(4);
    let ticks: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
    let a_second = rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_secs_f64(ticks as f64 / a_second as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

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
