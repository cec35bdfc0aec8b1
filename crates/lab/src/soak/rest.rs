//! Rests of the mix: drivers make no requests and programs are stopped, so memfold's counters are
//! comparable. What the shell and Python have forked is not stopped: it goes on until it ends.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use memfold_sys::process::Process;

/// What the lab asks for on standard input; the answer is [`RESTING`].
pub const REST: &str = "rest";
/// What ends a rest.
pub const WORK: &str = "work";
/// Printed once the drivers wait and the programs are stopped.
pub const RESTING: &str = "resting";

/// How long the programs may take until all rest. A smaller value fails on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// Which programs rest. Drivers of servers wait between two requests, other programs are stopped.
#[derive(Debug, Default)]
pub struct Rest {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    wanted: bool,
    /// Number of drivers that exist, and of those that wait.
    drivers: usize,
    waiting: usize,
    /// Programs without a driver.
    programs: Vec<Process>,
}

impl Rest {
    /// Adds a driver, which calls [`Rest::wait_if_wanted`] between two requests.
    pub fn add_driver(&self) {
        self.lock().drivers += 1;
    }

    /// Adds a program that rests while it is stopped.
    pub fn add_program(&self, program: Process) {
        self.lock().programs.push(program);
    }

    /// Called by a driver: returns once work may go on.
    pub fn wait_if_wanted(&self) {
        let mut state = self.lock();
        if !state.wanted {
            return;
        }
        state.waiting += 1;
        self.changed.notify_all();
        let waited = self.changed.wait_while(state, |state| state.wanted);
        waited.unwrap_or_else(PoisonError::into_inner).waiting -= 1;
    }

    /// Begins a rest; returns once no driver works.
    pub fn begin(&self) -> Result<()> {
        let mut state = self.lock();
        state.wanted = true;
        signal_all(&state.programs, libc::SIGSTOP)?;
        let all = |state: &mut State| state.waiting < state.drivers;
        let waited = self.changed.wait_timeout_while(state, TIMEOUT, all);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        ensure!(
            state.waiting == state.drivers,
            "{} of {} servers did not answer their requests within {} s",
            state.drivers - state.waiting,
            state.drivers,
            TIMEOUT.as_secs()
        );
        Ok(())
    }

    /// Ends a rest, if there is one.
    pub fn end(&self) -> Result<()> {
        let mut state = self.lock();
        state.wanted = false;
        self.changed.notify_all();
        signal_all(&state.programs, libc::SIGCONT)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn signal_all(programs: &[Process], signal: i32) -> Result<()> {
    for program in programs {
        program
            .signal(signal)
            .context("a program exited before the end of the run")?;
    }
    Ok(())
}
