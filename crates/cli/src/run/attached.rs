//! While a program is attached that runs already: signals, its end, questions and commands.
//!
//! The program is no child of memfold's, so its status is not known, and signals to memfold are not for it: those that
//! ask to end have it detached, and memfold ends once it holds nothing.

use super::cpu_time::{SinceAttached, cpu_seconds};
use super::host_swap::HostSwap;
use super::signals::Signals;
use super::thrashing::Thrashing;
use super::watch::Watched;
use crate::control::{self, of_run};
use crate::live::Server;
use crate::report::{Programs, Snapshot, Statistics};
use memfold_pager::{Attacher, Supervisor};
use memfold_sys::probe::Managed;
use memfold_sys::process::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks at what is held.
const INTERVAL: Duration = Duration::from_millis(100);
/// Between two looks at the CPU time, which is lost once the program has ended and was waited for. Longer loses more.
const CPU_TIME_INTERVAL: Duration = Duration::from_millis(500);
/// The same in times of what a look takes, so that these take a fiftieth of a CPU at most.
const REST: u32 = 50;
/// What keeps memfold once the program is let go is logged after this time.
const UNEXPLAINED: Duration = Duration::from_secs(1);

/// What is watched.
pub struct AttachedWatch<'a> {
    /// Holds the program.
    pub supervisor: &'a Supervisor,
    /// Where signals come from.
    pub signals: &'a Signals,
    /// Requests for statistics.
    pub server: Server,
    /// Commands.
    pub commands: Server,
    /// The program.
    pub process: Arc<Process>,
    /// Its command line, for display.
    pub command: String,
    /// The run's name.
    pub name: Option<String>,
    /// The program's CPU time.
    pub cpu_time: SinceAttached,
}

/// What changes while it is watched.
struct State {
    attacher: Attacher,
    started: Instant,
    /// When the CPU time is looked at.
    next_cpu_time: Instant,
    detaches: bool,
    /// Since when the program is not held any more.
    let_go: Option<Instant>,
    explained: bool,
}

impl AttachedWatch<'_> {
    /// Returns once nothing is held any more.
    pub fn until_done(self) -> Watched {
        let mut state = State {
            attacher: self.supervisor.attacher(),
            started: Instant::now(),
            next_cpu_time: Instant::now(),
            detaches: false,
            let_go: None,
            explained: false,
        };
        let mut thrashing = Thrashing::new();
        let mut host_swap = HostSwap::new(self.supervisor, Managed::Attached);
        loop {
            self.wait();
            self.take_signals(&mut state);
            thrashing.look(|| self.snapshot(&state).statistics);
            host_swap.look();
            self.look_at_cpu_time(&mut state);
            self.server.answer(|| self.snapshot(&state).into());
            control::serve(&self.commands, || {
                of_run(self.supervisor.control(), state.attacher.clone())
            });
            if !self.is_held(&mut state) && self.supervisor.stats().now.processes_now == 0 {
                control::finish();
                return Watched {
                    outcome: None,
                    unmanaged: 0,
                    programs: self.programs(),
                };
            }
            self.explain(&mut state);
        }
    }

    fn wait(&self) {
        let [_, signals] = self.signals.descriptors();
        let sources = [
            self.process.handle(),
            signals,
            self.server.descriptor(),
            self.commands.descriptor(),
        ];
        let mut descriptors = sources.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: INTERVAL.as_nanos() as i64,
        };
        // An interruption only means to look sooner.
        if poll(&mut descriptors, Some(&timeout)).is_ok()
            && descriptors[0].revents().contains(PollFlags::IN)
        {
            // It has ended: the descriptor stays ready.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn take_signals(&self, state: &mut State) {
        while let Some(received) = self.signals.next() {
            if received.asks_to_end() && !std::mem::replace(&mut state.detaches, true) {
                self.begin_to_detach(state);
            }
        }
    }

    /// On a thread of its own, as all memory is brought back first.
    fn begin_to_detach(&self, state: &mut State) {
        let (attacher, pid) = (state.attacher.clone(), self.process.pid());
        log::info!("bringing the memory of process {pid} back");
        let thread = std::thread::Builder::new().name("detach".to_owned());
        let started = thread.spawn(move || {
            if let Err(error) = attacher.detach(pid) {
                log::info!("process {pid} is not detached: {error}");
            }
            // What it forked goes with it, but not where it has ended.
            attacher.detach_all();
        });
        if let Err(error) = started {
            log::error!("cannot start a thread to detach the program: {error}; try again");
            state.detaches = false;
        }
    }

    /// Whether the program is held. One that executed another program is attached again.
    fn is_held(&self, state: &mut State) -> bool {
        if state.let_go.is_some() {
            return false;
        }
        let pid = self.process.pid();
        if self.supervisor.managed_processes().contains(&pid) {
            return true;
        }
        let wants = !state.detaches && state.attacher.holds(&self.process);
        let attached = wants && !self.has_ended() && self.attach_again(state);
        if !attached {
            state.let_go = Some(Instant::now());
        }
        attached
    }

    fn attach_again(&self, state: &State) -> bool {
        let attached = state.attacher.attach(&self.process);
        if let Err(error) = &attached {
            log::warn!(
                "process {} executed another program, which is not under the limit: {error}",
                self.process.pid()
            );
        }
        attached.is_ok()
    }

    fn has_ended(&self) -> bool {
        let main_thread = self.process.pid();
        matches!(self.process.state(main_thread), None | Some('Z' | 'X'))
    }

    /// Says once why memfold is still there.
    fn explain(&self, state: &mut State) {
        let is_late = |since: Instant| since.elapsed() > UNEXPLAINED;
        if state.let_go.is_some_and(is_late) && !std::mem::replace(&mut state.explained, true) {
            log::warn!(
                "process {} is let go; memfold stays until the processes end that it forked and whose memory memfold \
                 has in part",
                self.process.pid()
            );
        }
    }

    fn look_at_cpu_time(&self, state: &mut State) {
        let began = Instant::now();
        if began >= state.next_cpu_time {
            self.cpu_time();
            state.next_cpu_time = Instant::now() + (began.elapsed() * REST).max(CPU_TIME_INTERVAL);
        }
    }

    fn cpu_time(&self) -> Duration {
        self.cpu_time.spent(&self.supervisor.managed_processes())
    }

    fn programs(&self) -> Programs {
        let cpu = self.cpu_time();
        Programs {
            name: self.name.clone(),
            program_cpu_seconds: cpu.as_secs_f64(),
            peak_unmanaged_bytes: 0,
            comfortable_limit_bytes: self.supervisor.comfortable_limit(cpu),
            held_limit_bytes: self.supervisor.held_limit(),
        }
    }

    fn snapshot(&self, state: &State) -> Snapshot {
        let stats = self.supervisor.stats();
        Snapshot {
            pid: std::process::id(),
            program_pid: self.process.pid() as u32,
            command: self.command.clone(),
            uptime_seconds: state.started.elapsed().as_secs_f64(),
            now: stats.now,
            programs: self.supervisor.programs(),
            statistics: Statistics::new(&stats, cpu_seconds(), 0, self.programs()),
        }
    }
}
