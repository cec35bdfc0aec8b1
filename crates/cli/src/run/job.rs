//! Job control: memfold stops with its program, so that the shell sees its job stopped.
//!
//! A stopped memfold serves no page and lets no program start, so it stops only with all that is below it. Where other
//! programs run on (a daemon in a session of its own), it stops for a moment, in which the shell takes the terminal
//! back, and runs on. The shell takes the job for running then, and continues nothing at `fg`: memfold does.

use super::raise::{stop_awhile, stop_by};
use super::received::Received;
use super::signals::Signals;
use crate::format::printable;
use memfold_sys::process::{own_id, proc_text};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::time::{Duration, Instant};

/// A program may take so long to stop at a signal of the terminal, as it saves its screen.
const SLOW: Duration = Duration::from_secs(10);
/// What gets the same signal as the program stops within this time, or does not.
const GRACE: Duration = Duration::from_millis(300);
/// How long memfold stops for the shell to see it.
const AWHILE: Duration = Duration::from_millis(200);
/// After so long the shell has taken the terminal back if it does at all.
const HANDED_BACK: Duration = Duration::from_millis(500);
/// Between two looks at what is stopped: in the first moment, and then.
const INTERVALS: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(200)];

/// What is known of the job.
#[derive(Debug, Default)]
pub struct Job {
    /// When memfold was sent a signal that stops, and is not continued since.
    asked: Option<Instant>,
    stop: Option<Stop>,
}

/// The program's.
#[derive(Debug)]
struct Stop {
    signal: Signal,
    since: Instant,
    /// When memfold stopped for a moment.
    shown: Option<Instant>,
    warned: bool,
}

impl Job {
    /// Takes in a signal to memfold.
    pub fn received(&mut self, received: Received) {
        if received.signal == Signal::SIGCONT {
            self.asked = None;
        } else if received.stops() && !received.was_ignored {
            self.asked = Some(Instant::now());
        }
    }

    /// The program was stopped by a signal. `SIGSTOP` means one process (a debugger, `cpulimit`).
    pub fn program_stopped(&mut self, number: i32) {
        use Signal::{SIGTSTP, SIGTTIN, SIGTTOU};
        if let Ok(signal @ (SIGTSTP | SIGTTIN | SIGTTOU)) = Signal::try_from(number) {
            self.stop = Some(Stop {
                signal,
                since: Instant::now(),
                shown: None,
                warned: false,
            });
        }
    }

    /// When it is to be looked at again at the latest, if the program is stopped.
    pub fn next_look(&self) -> Option<Instant> {
        let stop = self.followed()?;
        let is_new = stop.since.elapsed() < GRACE;
        Some(Instant::now() + INTERVALS[usize::from(!is_new)])
    }

    /// The stop if memfold was sent a signal, too. One to the program alone is between it and the sender, who continues
    /// nothing else.
    fn followed(&self) -> Option<&Stop> {
        let (stop, asked) = (self.stop.as_ref()?, self.asked?);
        (asked + SLOW >= stop.since).then_some(stop)
    }

    /// Stops memfold if the program is stopped and all `others`.
    pub fn follow(&mut self, program: i32, others: impl FnOnce() -> Vec<i32>, signals: &Signals) {
        let is_stopped = || Standing::of(program).is_some_and(|standing| standing.state == 'T');
        if self.stop.is_some() && !is_stopped() {
            self.stop = None;
        }
        let Some(&Stop { signal, since, .. }) = self.followed() else {
            return;
        };
        let Some(own) = Standing::of(own_id()) else {
            return;
        };
        let running = others()
            .into_iter()
            .find(|pid| Standing::of(*pid).is_some_and(|standing| standing.runs(&own)));
        match running {
            None => {
                if let Err(error) = stop_by(signal, is_stopped) {
                    log::debug!("memfold is not stopped: {error}");
                }
                signals.forget_stops();
                *self = Job::default();
            }
            Some(_) if since.elapsed() < GRACE => {}
            Some(pid) => self.run_on(pid, &own, signals),
        }
    }

    /// The program is stopped, and memfold cannot be.
    fn run_on(&mut self, running: i32, own: &Standing, signals: &Signals) {
        let Some(stop) = &mut self.stop else { return };
        if !std::mem::replace(&mut stop.warned, true) {
            let name = proc_text(&format!("/proc/{running}/comm")).unwrap_or_default();
            log::warn!(
                "the program is stopped; {} (PID {running}) is not and needs memfold, which runs on: continue the \
                 program by fg or kill -CONT, not by bg",
                printable(name.trim_end())
            );
        }
        if !own.is_in_foreground() {
            return;
        }
        match stop.shown {
            None => {
                if let Err(error) = stop_awhile(stop.signal, AWHILE) {
                    log::debug!("memfold is not stopped: {error}");
                }
                signals.forget_stops();
                stop.shown = Some(Instant::now());
            }
            // `fg`, or no shell has taken the terminal back.
            Some(shown) if shown.elapsed() >= HANDED_BACK => {
                let _ = kill(Pid::from_raw(0), Signal::SIGCONT);
                *self = Job::default();
            }
            Some(_) => {}
        }
    }
}

/// A process as job control sees it.
#[derive(Debug, PartialEq, Eq)]
struct Standing {
    /// Of its main thread.
    state: char,
    group: i32,
    /// The group in the foreground of its terminal, -1 without one.
    foreground: i32,
}

impl Standing {
    fn of(pid: i32) -> Option<Standing> {
        Standing::of_stat(&proc_text(&format!("/proc/{pid}/stat")).ok()?)
    }

    /// From the text of `/proc/PID/stat`. The name, in parentheses, may be of any bytes.
    fn of_stat(text: &str) -> Option<Standing> {
        let mut fields = text.rsplit_once(") ")?.1.split(' ');
        Some(Standing {
            state: fields.next()?.parse().ok()?,
            group: fields.nth(1)?.parse().ok()?,
            foreground: fields.nth(2)?.parse().ok()?,
        })
    }

    /// Whether it may need memfold. What is of memfold's group and waits in `vfork` stops later, and its child has.
    fn runs(&self, own: &Standing) -> bool {
        match self.state {
            'T' | 't' | 'Z' | 'X' => false,
            'D' => self.group != own.group,
            _ => true,
        }
    }

    fn is_in_foreground(&self) -> bool {
        self.foreground == self.group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_does_not_hide_the_state() {
        let text = "12 (a) T (b) S 1 34 12 34816 56 4194560 1 2";
        let standing = Standing::of_stat(text).unwrap();
        assert_eq!((standing.state, standing.group), ('S', 34));
        assert_eq!(standing.foreground, 56);
        assert!(Standing::of(own_id()).is_some());
    }

    #[test]
    fn a_stop_of_the_program_alone_is_not_followed() {
        let received = |signal| Received {
            signal,
            by_terminal: true,
            was_ignored: false,
        };
        let mut job = Job::default();
        job.program_stopped(Signal::SIGTSTP as i32);
        assert!(job.followed().is_none());
        job.received(received(Signal::SIGTSTP));
        assert!(job.followed().is_some());
        job.received(received(Signal::SIGCONT));
        assert!(job.followed().is_none());
        let mut job = Job::default();
        job.received(received(Signal::SIGTSTP));
        job.program_stopped(Signal::SIGSTOP as i32);
        assert!(job.followed().is_none());
    }
}
