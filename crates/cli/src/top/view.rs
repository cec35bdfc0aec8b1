//! What is on the screen: the runs and disks, their order, the one that is chosen, and their history.

use super::limit_dialog::{LimitChange, LimitDialog, Proposal, Step};
use super::mappings::Mapping;
use crate::instance::Instance;
use crate::report::Snapshot;
use memfold_pager::ProgramUsage;
use ratatui::crossterm::event::KeyCode;
use std::collections::HashMap;

/// Seconds of history that are kept: more than a terminal is wide.
const HISTORY: usize = 512;

/// Pages swapped out and in, one number a second, the latest last.
#[derive(Debug, Default)]
pub struct Traffic {
    /// Pages out.
    pub out: Vec<u64>,
    /// Pages in.
    pub back: Vec<u64>,
}

impl Traffic {
    /// The latest: out and in.
    pub fn latest(&self) -> (u64, u64) {
        let last = |history: &[u64]| history.last().copied().unwrap_or(0);
        (last(&self.out), last(&self.back))
    }
}

/// What the runs are sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// Lowest first.
    #[default]
    Pid,
    /// Most bytes first.
    Held,
    /// Most pages out a second first.
    Out,
    /// Most pages in a second first.
    In,
    /// By the alphabet.
    Command,
}

impl Order {
    fn next(self) -> Order {
        match self {
            Order::Pid => Order::Held,
            Order::Held => Order::Out,
            Order::Out => Order::In,
            Order::In => Order::Command,
            Order::Command => Order::Pid,
        }
    }

    /// The title of its column.
    pub fn title(self) -> &'static str {
        match self {
            Order::Pid => "PID",
            Order::Held => "USED",
            Order::Out => "OUT/s",
            Order::In => "IN/s",
            Order::Command => "COMMAND",
        }
    }
}

/// What is shown below the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Detail {
    /// Statistics and graphs of the chosen one.
    #[default]
    Statistics,
    /// The programs of a run.
    Programs,
    /// The mappings of one of them.
    Mappings,
}

/// What is on the screen.
#[derive(Debug, Default)]
pub struct View {
    /// In the order in which they are shown.
    pub instances: Vec<Instance>,
    /// Per PID.
    pub traffic: HashMap<u32, Traffic>,
    /// PID of the chosen one.
    pub chosen: Option<u32>,
    /// How they are sorted.
    pub order: Order,
    /// Whether the other way round.
    pub is_reversed: bool,
    /// What is shown of the chosen one.
    pub detail: Detail,
    /// PID of the chosen program of the chosen run; without one, the one with the most memory is meant.
    pub program: Option<i32>,
    /// Its mappings, once they are known, or why they are not.
    pub mappings: Option<Result<Vec<Mapping>, String>>,
    /// Whether the help is shown.
    pub helps: bool,
    /// What is asked about a limit.
    pub dialog: Option<LimitDialog>,
    /// What came of the last command.
    pub notice: Option<String>,
    /// A limit that is to be changed.
    pub confirmed: Option<LimitChange>,
}

/// The programs of a run, those with the most resident memory first.
pub fn programs_of(run: &Snapshot) -> Vec<ProgramUsage> {
    let mut programs = run.programs.clone();
    programs.sort_by_key(|usage| std::cmp::Reverse(usage.resident_bytes));
    programs
}

/// The base name of a program and its arguments.
fn short_command(command: &str) -> &str {
    let end = command.find(' ').unwrap_or(command.len());
    let start = command[..end].rfind('/').map_or(0, |slash| slash + 1);
    &command[start..]
}

/// The base name of a run's program with its arguments, or a disk's address.
pub fn short_title(instance: &Instance) -> String {
    match instance {
        Instance::Run(run) => short_command(&run.command).to_owned(),
        Instance::Disk(_) => instance.title(),
    }
}

impl View {
    /// Takes what runs now.
    pub fn refresh(&mut self, instances: Vec<Instance>) {
        for now in &instances {
            let pid = now.pid();
            let before = self.instances.iter().find(|before| before.pid() == pid);
            let Some(before) = before else { continue };
            let traffic = self.traffic.entry(pid).or_default();
            push(&mut traffic.out, now.pages_out(), before.pages_out());
            push(&mut traffic.back, now.pages_in(), before.pages_in());
        }
        self.traffic
            .retain(|pid, _| instances.iter().any(|instance| instance.pid() == *pid));
        self.instances = instances;
        self.sort();
        if self.place().is_none() {
            self.chosen = self.instances.first().map(Instance::pid);
        }
    }

    fn sort(&mut self) {
        let latest = |one: &Instance| self.traffic.get(&one.pid()).map_or((0, 0), Traffic::latest);
        let descending = |number: u64| std::cmp::Reverse(number);
        let instances = &mut self.instances;
        match self.order {
            Order::Pid => instances.sort_by_key(Instance::pid),
            Order::Held => instances.sort_by_key(|one| descending(one.limit().0)),
            Order::Out => instances.sort_by_key(|one| descending(latest(one).0)),
            Order::In => instances.sort_by_key(|one| descending(latest(one).1)),
            Order::Command => instances.sort_by_cached_key(short_title),
        }
        if self.is_reversed {
            self.instances.reverse();
        }
    }

    /// The row of the chosen one.
    pub fn place(&self) -> Option<usize> {
        self.instances
            .iter()
            .position(|instance| Some(instance.pid()) == self.chosen)
    }

    /// The chosen one.
    pub fn instance(&self) -> Option<&Instance> {
        self.place().map(|place| &self.instances[place])
    }

    /// The chosen program, and its row.
    pub fn chosen_program(&self) -> Option<(usize, i32)> {
        let Some(Instance::Run(run)) = self.instance() else {
            return None;
        };
        let programs = programs_of(run);
        let place = |pid| programs.iter().position(|usage| usage.pid == pid);
        let row = self.program.and_then(place).unwrap_or(0);
        programs.get(row).map(|usage| (row, usage.pid))
    }

    /// Takes a key. Returns `false` if it ends the view.
    pub fn press(&mut self, key: KeyCode) -> bool {
        if self.helps {
            self.helps = false;
            return true;
        }
        self.notice = None;
        if let Some(dialog) = self.dialog.take() {
            match dialog.press(key) {
                Step::Open(dialog) => self.dialog = Some(dialog),
                Step::Closed => self.notice = Some("no limit is changed".to_owned()),
                Step::Confirmed(change) => self.confirmed = Some(change),
                Step::Refused(dialog, why) => {
                    (self.dialog, self.notice) = (Some(dialog), Some(why));
                }
            }
            return true;
        }
        match key {
            KeyCode::Char('q') => return false,
            KeyCode::Esc if self.detail == Detail::Statistics => return false,
            KeyCode::Esc => self.show(Detail::Statistics),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.helps = true,
            KeyCode::Up | KeyCode::Char('k') => self.step(|place, _| place.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.step(|place, last| (place + 1).min(last)),
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
            KeyCode::Enter => self.show(match self.detail {
                Detail::Statistics => Detail::Programs,
                Detail::Programs => Detail::Mappings,
                Detail::Mappings => Detail::Statistics,
            }),
            KeyCode::Char('p') => self.show(match self.detail {
                Detail::Programs => Detail::Statistics,
                Detail::Statistics | Detail::Mappings => Detail::Programs,
            }),
            KeyCode::Char('m') => self.show(match self.detail {
                Detail::Mappings => Detail::Statistics,
                Detail::Statistics | Detail::Programs => Detail::Mappings,
            }),
            KeyCode::Char('l') => self.ask(Proposal::Typed),
            KeyCode::Char('+') => self.ask(Proposal::More),
            KeyCode::Char('-') => self.ask(Proposal::Less),
            _ => {}
        }
        self.sort();
        true
    }

    fn show(&mut self, detail: Detail) {
        self.detail = detail;
        self.mappings = None;
    }

    fn ask(&mut self, proposal: Proposal) {
        let Some(instance) = self.instance() else {
            return;
        };
        match LimitDialog::open(instance, proposal) {
            Ok(dialog) => self.dialog = Some(dialog),
            Err(why) => self.notice = Some(why),
        }
    }

    /// Chooses another row: of the programs where they are shown, else of the runs and disks.
    fn step(&mut self, to: impl Fn(usize, usize) -> usize) {
        if self.detail == Detail::Programs
            && let Some(Instance::Run(run)) = self.instance()
            && let Some((row, _)) = self.chosen_program()
        {
            let programs = programs_of(run);
            self.program = Some(programs[to(row, programs.len() - 1)].pid);
            return;
        }
        if let (Some(place), Some(last)) = (self.place(), self.instances.len().checked_sub(1)) {
            let next = self.instances[to(place, last)].pid();
            if self.chosen.replace(next) != Some(next) {
                (self.program, self.mappings) = (None, None);
            }
        }
    }
}

fn push(history: &mut Vec<u64>, now: u64, before: u64) {
    // Multiplied when it is drawn; no honest run has more.
    const MOST: u64 = 1 << 40;
    history.push(now.saturating_sub(before).min(MOST));
    let surplus = history.len().saturating_sub(HISTORY);
    history.drain(..surplus);
}
