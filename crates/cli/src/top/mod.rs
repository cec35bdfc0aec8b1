//! `memfold top`: the runs and disks of this user, refreshed once a second.

mod columns;
mod details;
mod draw;
mod view;

use crate::arguments::TopArguments;
use crate::failure::Failure;
use crate::live;
use crate::stat::nothing_runs;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use view::View;

const INTERVAL: Duration = Duration::from_secs(1);
/// A run that takes longer to answer is left out of a view: keys are waited for meanwhile.
const PATIENCE: Duration = Duration::from_millis(500);

/// `memfold top [PID]`. Waits where there is nothing, unless one was asked for.
pub fn top(arguments: &TopArguments) -> Result<ExitCode, Failure> {
    if !io::stdout().is_terminal() {
        return Err(Failure::own(
            "memfold top needs a terminal on standard output; memfold stat prints the same statistics",
        ));
    }
    let mut view = View::default();
    let found = live::instances_of(arguments.pid, live::PATIENCE);
    if found.is_empty() && arguments.pid.is_some() {
        return Err(nothing_runs(arguments.pid));
    }
    view.refresh(found);
    let mut terminal = ratatui::try_init()
        .map_err(|error| Failure::own(format!("cannot use the terminal: {error}")))?;
    let shown = show(&mut terminal, &mut view, arguments.pid);
    ratatui::restore();
    shown.map_err(|error| Failure::own(format!("cannot use the terminal: {error}")))?;
    Ok(ExitCode::SUCCESS)
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    view: &mut View,
    pid: Option<u32>,
) -> io::Result<()> {
    let mut next = Instant::now() + INTERVAL;
    loop {
        terminal.draw(|frame| view.draw(frame))?;
        if event::poll(next.saturating_duration_since(Instant::now()))? {
            match event::read()? {
                Event::Key(key) if is_interrupt(&key) => return Ok(()),
                Event::Key(key) if key.kind == KeyEventKind::Press && !view.press(key.code) => {
                    return Ok(());
                }
                _ => {}
            }
            continue;
        }
        next = Instant::now() + INTERVAL;
        view.refresh(live::instances_of(pid, PATIENCE));
    }
}

fn is_interrupt(key: &KeyEvent) -> bool {
    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)
}
