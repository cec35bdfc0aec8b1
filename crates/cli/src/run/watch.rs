//! While the program runs: signals, exits of processes, requests for statistics.

use super::attachments::Attachments;
use super::cpu_time::{cpu_seconds, of_programs};
use super::descendants::{Descendants, Finding, GRACE, Known};
use super::descriptors;
use super::escalation::{SAME_REQUEST, signal_below};
use super::host_swap::HostSwap;
use super::job::Job;
use super::outcome::Outcome;
use super::received::Received;
use super::signals::Signals;
use super::stillness::Stillness;
use super::thrashing::Thrashing;
use super::unmanaged::{self, Reason};
use crate::control::{self, of_run};
use crate::format::printable;
use crate::live::Server;
use crate::report::{Programs, Snapshot, Statistics};
use memfold_pager::Supervisor;
use memfold_sys::probe::Managed;
use memfold_sys::process;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{WaitOptions, wait};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Between two looks at the processes below memfold, and at most. Longer lets programs grow that are to be attached.
const INTERVALS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];
/// The interval in times of what a look takes, so that these take a fiftieth of a CPU at most.
const REST: u32 = 50;
/// The same once the program has ended: only what it left behind is waited for.
const INTERVAL_AFTER: Duration = Duration::from_millis(100);
/// Programs that have not connected when they are judged may have met with a shortage this long ago.
const SHORTAGE: Duration = INTERVALS[1].saturating_add(GRACE);
/// Once the program has exited, what memfold still waits for is logged after this time.
const UNEXPLAINED: Duration = Duration::from_secs(1);

/// What is watched.
pub struct Watch<'a> {
    /// Holds the processes.
    pub supervisor: &'a Supervisor,
    /// Where signals come from.
    pub signals: &'a Signals,
    /// Requests for statistics.
    pub server: Server,
    /// Commands.
    pub commands: Server,
    /// The program's PID.
    pub program: i32,
    /// Its command line, for display.
    pub command: String,
    /// The run's name.
    pub name: Option<String>,
    /// Where the number of programs goes that could not be held, for other threads.
    pub unmanaged: Arc<AtomicU64>,
}

/// What a run came to.
pub struct Watched {
    /// How the program ended; not known of one that was attached.
    pub outcome: Option<Outcome>,
    /// Processes that were found outside the limit.
    pub unmanaged: u64,
    /// What the command line knows of the programs.
    pub programs: Programs,
}

impl Watched {
    /// This signal came before there was a program.
    pub fn not_started(signal: Signal, name: Option<String>) -> Watched {
        Watched {
            outcome: Some(Outcome::Killed(signal as i32)),
            unmanaged: 0,
            programs: Programs {
                name,
                ..Programs::default()
            },
        }
    }
}

/// What changes while it is watched.
struct State {
    descendants: Descendants,
    job: Job,
    started: Instant,
    /// How the program ended, and when.
    ended: Option<(Outcome, Instant)>,
    /// When what was left behind was first asked to end.
    asked_to_end: Option<Instant>,
    explained: bool,
    warned: bool,
    /// Programs for which there were no descriptors.
    without_descriptors: u64,
}

impl Watch<'_> {
    /// Returns what the run came to once nothing is left to hold.
    pub fn until_done(self) -> Watched {
        let attachments = Attachments::new(self.supervisor.attacher());
        if unmanaged::is_static(self.program) {
            attachments.begin(self.program);
        }
        let mut state = State {
            descendants: Descendants::new(self.supervisor.preload_path(), Some(attachments)),
            job: Job::default(),
            started: Instant::now(),
            ended: None,
            asked_to_end: None,
            explained: false,
            warned: false,
            without_descriptors: 0,
        };
        let mut next_look = state.started + INTERVALS[0];
        let mut thrashing = Thrashing::new();
        let mut host_swap = HostSwap::new(self.supervisor, Managed::Started);
        let mut stillness = Stillness::new();
        loop {
            let stopped = state.job.next_look();
            self.wait_until(stopped.map_or(next_look, |look| look.min(next_look)));
            self.take_signals(&mut state);
            self.server.answer(|| self.snapshot(&state).into());
            control::serve(&self.commands, || {
                of_run(self.supervisor.control(), self.supervisor.attacher())
            });
            let just_ended = self.reap(&mut state);
            self.follow_stop(&mut state);
            if just_ended || Instant::now() >= next_look {
                let began = Instant::now();
                let is_still = state.descendants.is_settled() && stillness.is_still();
                if state.ended.is_some() || !is_still {
                    stillness.begin_look();
                    let findings = self.look(&mut state);
                    Self::warn(&mut state, findings);
                }
                thrashing.look(|| self.snapshot(&state).statistics);
                host_swap.look();
                let [shortest, longest] = INTERVALS;
                let interval = if state.ended.is_some() {
                    INTERVAL_AFTER
                } else {
                    (began.elapsed() * REST).clamp(shortest, longest)
                };
                next_look = Instant::now() + interval;
            }
            if let Some((outcome, since)) = state.ended {
                if self.no_process_needs_memory(&mut state) {
                    self.notice_unseen(&mut state);
                    if state.without_descriptors > 1 {
                        descriptors::warn_of_shortage(state.without_descriptors);
                    }
                    return Watched {
                        outcome: Some(outcome),
                        unmanaged: state.descendants.unmanaged(),
                        programs: self.programs(&state),
                    };
                }
                self.explain(&mut state, outcome, since);
            }
        }
    }

    /// Looks at the tree of processes: thoroughly once the program has ended, as memfold leaves where none is left.
    fn look(&self, state: &mut State) -> Vec<Finding> {
        let known = Known {
            managed: self.supervisor.managed_processes(),
            waiting: self.supervisor.waiting_processes(),
            guardian: self.supervisor.guardian_process(),
            is_short: self.supervisor.was_short_of_descriptors(SHORTAGE),
        };
        let findings = if state.ended.is_some() {
            state.descendants.look(&known)
        } else {
            state.descendants.glance(&known)
        };
        self.unmanaged
            .store(state.descendants.unmanaged(), Ordering::Relaxed);
        findings
    }

    /// Sleeps until something is to be done, at most until then.
    fn wait_until(&self, deadline: Instant) {
        let rest = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: rest.as_secs() as i64,
            tv_nsec: i64::from(rest.subsec_nanos()),
        };
        let [children, signals] = self.signals.descriptors();
        let sources = [
            children,
            signals,
            self.server.descriptor(),
            self.commands.descriptor(),
        ];
        let mut descriptors = sources.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // An interruption only means to look sooner.
        let _ = poll(&mut descriptors, Some(&timeout));
    }

    fn take_signals(&self, state: &mut State) {
        while let Some(received) = self.signals.next() {
            state.job.received(received);
            match state.ended {
                None => self.pass_on(received),
                Some(_) if received.was_ignored => {}
                Some(_) => self.end_the_rest(state, received.signal),
            }
        }
    }

    /// What the terminal sent has reached the program by itself.
    fn pass_on(&self, received: Received) {
        if !received.by_terminal {
            let _ = kill(Pid::from_raw(self.program), received.signal);
        }
    }

    fn follow_stop(&self, state: &mut State) {
        let guardian = self.supervisor.guardian_process();
        let others = || {
            let mut below = process::below(process::own_id());
            below.retain(|pid| Some(*pid) != guardian);
            below
        };
        state.job.follow(self.program, others, self.signals);
    }

    /// Takes in what ended. Returns whether the program is among them, or any once it has ended.
    fn reap(&self, state: &mut State) -> bool {
        let mut relevant = false;
        while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            relevant |= state.ended.is_some();
            if pid.as_raw_nonzero().get() != self.program {
                continue;
            }
            if let Some(outcome) = Outcome::of(ExitStatus::from_raw(status.as_raw())) {
                self.signals.escalation().program_ended();
                let outcome = self.asked_twice().unwrap_or(outcome);
                state.ended = Some((outcome, Instant::now()));
                relevant = true;
            } else if let Some(signal) = status.stopping_signal() {
                state.job.program_stopped(signal);
            }
        }
        relevant
    }

    /// If the run was asked to end twice, its outcome is the second signal.
    fn asked_twice(&self) -> Option<Outcome> {
        let signal = self.signals.escalation().ended_by()?;
        log::warn!(
            "received {signal} a second time: killed the program and all processes it started"
        );
        Some(Outcome::Killed(signal as i32))
    }

    /// Whether memfold may exit. That would kill a process it missed, so it scans twice.
    fn no_process_needs_memory(&self, state: &mut State) -> bool {
        if !self.waited_for(state).is_empty() {
            return false;
        }
        let findings = self.look(state);
        Self::warn(state, findings);
        self.waited_for(state).is_empty()
    }

    /// The processes that memfold cannot leave behind: those it holds, or all, if it holds none but still has
    /// the memory of one. (A child that was forked without `pthread_atfork` has no helper, and its PID may not
    /// be known.)
    fn waited_for(&self, state: &State) -> Vec<i32> {
        let held = state.descendants.held();
        if held.is_empty() && self.supervisor.stats().now.processes_now > 0 {
            return state.descendants.all();
        }
        held
    }

    fn warn(state: &mut State, findings: Vec<Finding>) {
        let lack = |finding: &&Finding| finding.reason == Reason::Descriptors;
        state.without_descriptors += findings.iter().filter(lack).count() as u64;
        let Some(first) = findings.into_iter().next() else {
            return;
        };
        if !state.warned {
            let name = printable(&first.name);
            log::warn!(
                "{name} (PID {}) is not under the limit: {}",
                first.pid,
                first.reason
            );
            state.warned = true;
        }
    }

    /// A program too short to be looked at that never connected.
    fn notice_unseen(&self, state: &mut State) {
        if self.supervisor.stats().totals.processes == 0 && state.descendants.unmanaged() == 0 {
            state.descendants.count_unseen();
            let name = self
                .command
                .split(' ')
                .next()
                .unwrap_or_default()
                .to_owned();
            Self::warn(
                state,
                vec![Finding {
                    pid: self.program,
                    name,
                    reason: Reason::Unseen,
                }],
            );
        }
    }

    /// Says once why memfold is still there.
    fn explain(&self, state: &mut State, outcome: Outcome, since: Instant) {
        if state.explained || since.elapsed() < UNEXPLAINED {
            return;
        }
        let held = self.waited_for(state);
        state.explained = true;
        let numbers: Vec<String> = held.iter().take(8).map(i32::to_string).collect();
        let more = if held.len() > 8 { " …" } else { "" };
        log::info!(
            "the program exited with status {}; waiting for the processes it left running: PID \
             {}{more} (interrupt to end them)",
            outcome.exit_code(),
            numbers.join(" ")
        );
    }

    /// The program has ended, what it left behind has not: the first signal that asks to end is
    /// passed on to all of it, a later one ends it. (memfold cannot leave before them: the memory it
    /// holds for them would be gone.)
    fn end_the_rest(&self, state: &mut State, signal: Signal) {
        use Signal::{SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM};
        if !matches!(signal, SIGHUP | SIGINT | SIGQUIT | SIGTERM) {
            return;
        }
        let send = match state.asked_to_end {
            Some(since) if since.elapsed() > SAME_REQUEST => SIGKILL,
            Some(_) => return,
            None => signal,
        };
        state.asked_to_end.get_or_insert_with(Instant::now);
        self.look(state);
        for pid in self.waited_for(state) {
            signal_below(pid, send);
        }
    }

    fn programs(&self, state: &State) -> Programs {
        let cpu = of_programs(&state.descendants.all());
        Programs {
            name: self.name.clone(),
            program_cpu_seconds: cpu.as_secs_f64(),
            peak_unmanaged_bytes: state.descendants.peak_unmanaged_bytes(),
            comfortable_limit_bytes: self.supervisor.comfortable_limit(cpu),
            held_limit_bytes: self.supervisor.held_limit(),
        }
    }

    fn snapshot(&self, state: &State) -> Snapshot {
        let stats = self.supervisor.stats();
        Snapshot {
            pid: std::process::id(),
            program_pid: self.program as u32,
            command: self.command.clone(),
            uptime_seconds: state.started.elapsed().as_secs_f64(),
            now: stats.now,
            programs: self.supervisor.programs(),
            statistics: Statistics::new(
                &stats,
                cpu_seconds(),
                state.descendants.unmanaged(),
                self.programs(state),
            ),
        }
    }
}
