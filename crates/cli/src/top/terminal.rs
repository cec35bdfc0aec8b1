//! The terminal, which is as it was found whenever this process ends or stops.

use crate::run::raise::die_by;
use crate::sync::lock;
use memfold_sys::inherited::was_ignored;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::{DefaultTerminal, Frame};
use std::io::{self, stdout};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What asks this process to end. (Ctrl-C is a key here.)
const ENDS: [Signal; 4] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
];
/// A terminal that takes no output for so long is left as it is.
const PATIENCE: Duration = Duration::from_secs(1);

/// The terminal in raw mode, with its other screen.
pub struct Terminal {
    inner: DefaultTerminal,
    /// Held by the one who writes to it.
    turn: Turn,
}

#[derive(Clone, Default)]
struct Turn(Arc<Mutex<()>>);

impl Turn {
    fn take(&self) -> MutexGuard<'_, ()> {
        lock(&self.0)
    }
}

impl Terminal {
    /// Takes the terminal. To be called while there is one thread.
    pub fn take() -> io::Result<Terminal> {
        let ends = ENDS
            .into_iter()
            .filter(|signal| !was_ignored(*signal as i32));
        let ends: SigSet = ends.collect();
        ends.thread_block()?;
        let turn = Turn::default();
        let waiting = turn.clone();
        // A thread of its own: that of the keys may wait for a terminal that is gone.
        std::thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                if let Ok(signal) = ends.wait() {
                    end_by(signal, waiting);
                }
            })?;
        let taking = turn.take();
        let inner = ratatui::try_init()?;
        drop(taking);
        Ok(Terminal { inner, turn })
    }

    /// Draws the screen.
    pub fn draw(&mut self, render: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let _turn = self.turn.take();
        self.inner.draw(render)?;
        Ok(())
    }

    /// Stops this process and its group, as Ctrl-Z does outside raw mode, until they are continued.
    pub fn stop(&mut self) -> io::Result<()> {
        let turn = self.turn.take();
        restore()?;
        drop(turn);
        kill(Pid::from_raw(0), Signal::SIGTSTP)?;
        let _turn = self.turn.take();
        enable_raw_mode()?;
        execute!(stdout(), EnterAlternateScreen)?;
        self.inner.clear()
    }

    /// Gives the terminal back.
    pub fn give_back(self) -> io::Result<()> {
        let _turn = self.turn.take();
        restore()
    }
}

fn restore() -> io::Result<()> {
    // The second is tried even if the first fails.
    let raw = disable_raw_mode();
    execute!(stdout(), LeaveAlternateScreen, Show)?;
    raw
}

/// Restores the terminal and ends this process by a signal.
fn end_by(signal: Signal, turn: Turn) {
    let end = move || {
        die_by(signal as i32);
        std::process::exit(128 + signal as i32);
    };
    let restoring = std::thread::Builder::new().spawn(move || {
        let _turn = turn.take();
        // Fails where the terminal is gone.
        let _ = restore();
        end();
    });
    if restoring.is_ok() {
        std::thread::sleep(PATIENCE);
    }
    end();
}
