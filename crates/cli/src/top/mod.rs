//! `memfold top`: the runs and disks of this user, refreshed once a second.

mod columns;
mod details;
mod draw;
mod limit_dialog;
mod mappings;
mod tables;
mod terminal;
mod view;

use crate::arguments::TopArguments;
use crate::control;
use crate::failure::Failure;
use crate::live::{self, RunFolder};
use crate::stat::nothing_runs;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::collections::HashMap;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};
use terminal::Terminal;
use view::{Detail, View};

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
    let mut screen = Screen::new(arguments.pid);
    screen.look(live::PATIENCE);
    if screen.folders.is_empty() && arguments.pid.is_some() {
        return Err(nothing_runs(arguments.pid));
    }
    let failed = |error| Failure::own(format!("cannot use the terminal: {error}"));
    let mut terminal = Terminal::take().map_err(failed)?;
    let shown = screen.show(&mut terminal);
    let given_back = terminal.give_back();
    shown.and(given_back).map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}

/// The view, and where what it shows comes from.
struct Screen {
    view: View,
    /// The PID that was asked for.
    pid: Option<u32>,
    /// Where the runs and disks are asked, by PID.
    folders: HashMap<u32, RunFolder>,
    /// What came of changes of limits.
    done: (Sender<String>, Receiver<String>),
}

impl Screen {
    fn new(pid: Option<u32>) -> Screen {
        Screen {
            view: View::default(),
            pid,
            folders: HashMap::new(),
            done: channel(),
        }
    }

    /// Asks the runs and disks.
    fn look(&mut self, patience: Duration) {
        let mut found = live::instances(patience);
        let pid = self.pid;
        found.retain(|(folder, one)| pid.is_none_or(|pid| live::is_meant(folder, one, pid)));
        let folders = found
            .iter()
            .map(|(folder, one)| (one.pid(), folder.clone()));
        self.folders = folders.collect();
        self.view
            .refresh(found.into_iter().map(|(_, instance)| instance).collect());
        self.look_at_mappings();
    }

    /// Asks for the mappings of the chosen program where they are shown.
    fn look_at_mappings(&mut self) {
        let view = &mut self.view;
        if view.detail != Detail::Mappings {
            return;
        }
        let folder = view.chosen.and_then(|pid| self.folders.get(&pid));
        view.mappings = view.chosen_program().zip(folder).map(|((_, pid), folder)| {
            let found = control::mappings(folder, pid, PATIENCE)?;
            Ok(mappings::named(pid, found))
        });
    }

    fn show(&mut self, terminal: &mut Terminal) -> io::Result<()> {
        let mut next = Instant::now() + INTERVAL;
        loop {
            while let Ok(outcome) = self.done.1.try_recv() {
                self.view.notice = Some(outcome);
            }
            terminal.draw(|frame| self.view.draw(frame))?;
            if event::poll(next.saturating_duration_since(Instant::now()))? {
                match event::read()? {
                    Event::Key(key) if is_control(&key, 'c') => return Ok(()),
                    Event::Key(key) if is_control(&key, 'z') => terminal.stop()?,
                    Event::Key(key) if key.kind == KeyEventKind::Press => {
                        if !self.view.press(key.code) {
                            return Ok(());
                        }
                        self.change_limit();
                        if self.view.mappings.is_none() {
                            self.look_at_mappings();
                        }
                    }
                    _ => {}
                }
                continue;
            }
            next = Instant::now() + INTERVAL;
            self.look(PATIENCE);
        }
    }

    /// Changes a limit once that is confirmed: in a thread of its own, as the run answers when it has come
    /// below it.
    fn change_limit(&mut self) {
        let Some(change) = self.view.confirmed.take() else {
            return;
        };
        self.view.notice = Some("changing the limit …".to_owned());
        let done = self.done.0.clone();
        let thread = std::thread::Builder::new().name("limit".into());
        // The view may have ended meanwhile.
        let started = thread.spawn(move || drop(done.send(change.perform())));
        if let Err(error) = started {
            self.view.notice = Some(format!("the limit is not changed: {error}"));
        }
    }
}

fn is_control(key: &KeyEvent, letter: char) -> bool {
    key.code == KeyCode::Char(letter) && key.modifiers.contains(KeyModifiers::CONTROL)
}
