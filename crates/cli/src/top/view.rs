//! What is on the screen: the runs and disks, their order, the one that is chosen, and their history.

use crate::instance::Instance;
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
            Order::Held => "HELD",
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
    /// Whether the help is shown.
    pub helps: bool,
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

    /// Takes a key. Returns `false` if it ends the view.
    pub fn press(&mut self, key: KeyCode) -> bool {
        if self.helps {
            self.helps = false;
            return true;
        }
        match key {
            KeyCode::Char('q') => return false,
            KeyCode::Esc if self.detail == Detail::Statistics => return false,
            KeyCode::Esc => self.detail = Detail::Statistics,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.helps = true,
            KeyCode::Up | KeyCode::Char('k') => self.step(|place, _| place.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.step(|place, last| (place + 1).min(last)),
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
            KeyCode::Enter | KeyCode::Char('p') => {
                self.detail = match self.detail {
                    Detail::Statistics => Detail::Programs,
                    Detail::Programs => Detail::Statistics,
                }
            }
            _ => {}
        }
        self.sort();
        true
    }

    fn step(&mut self, to: impl Fn(usize, usize) -> usize) {
        if let (Some(place), Some(last)) = (self.place(), self.instances.len().checked_sub(1)) {
            self.chosen = Some(self.instances[to(place, last)].pid());
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
