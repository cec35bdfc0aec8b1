//! Messages of memfold and its libraries on standard error while a program runs.
//!
//! One way for all: the `log` facade, so that the libraries need not know the logger (a program
//! that embeds them has a logger of its own), and `--quiet` is a level. Errors, which explain why a
//! program was killed, are always shown.
//!
//! A thread of its own writes them: no fault and no signal waits for a full pipe or a stopped terminal.

use crate::format::printable;
use crate::patient;
use crate::sync::lock;
use log::{Level, LevelFilter, Log, Metadata, Record};
use memfold_sys::signal;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Messages that may wait to be written; more are dropped.
const MOST_WAITING: usize = 1000;

/// Warnings that are remembered at most.
const MOST_REMEMBERED: usize = 100;

/// A warning or an error, and when it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Since [`remember_warnings`] was called.
    pub at: Duration,
    /// Its text.
    pub text: String,
}

/// Since when warnings are remembered, and those that came.
static REMEMBERED: Mutex<Option<(Instant, Vec<Warning>)>> = Mutex::new(None);

/// Remembers the warnings that are shown from now on.
pub fn remember_warnings() {
    *lock(&REMEMBERED) = Some((Instant::now(), Vec::new()));
}

/// What was remembered.
pub fn remembered() -> Vec<Warning> {
    let found = lock(&REMEMBERED);
    found
        .as_ref()
        .map(|(_, list)| list.clone())
        .unwrap_or_default()
}

fn remember(level: Level, text: &str) {
    if level > Level::Warn {
        return;
    }
    let mut found = lock(&REMEMBERED);
    if let Some((since, list)) = &mut *found
        && list.len() < MOST_REMEMBERED
    {
        list.push(Warning {
            at: since.elapsed(),
            text: text.to_owned(),
        });
    }
}

enum Order {
    Write(String),
    /// Answered by dropping it, after all that came before was written.
    Flush(#[expect(dead_code, reason = "its end is the answer")] SyncSender<()>),
}

static ORDERS: OnceLock<SyncSender<Order>> = OnceLock::new();

struct StandardError;

impl Log for StandardError {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("memfold")
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            // Names of files and what other machines say may be in it.
            let text = printable(&record.args().to_string());
            remember(record.level(), &text);
            let line = format!("memfold: {text}\n");
            let _ = ORDERS
                .get()
                .map(|orders| orders.try_send(Order::Write(line)));
        }
    }

    /// For a thread that is about to abort. Programs wait for that, so this waits only briefly.
    fn flush(&self) {
        const LONGEST: Duration = Duration::from_secs(1);
        let (answer, answered) = sync_channel(0);
        let asked = ORDERS
            .get()
            .map(|orders| orders.try_send(Order::Flush(answer)));
        if let Some(Ok(())) = asked {
            // Fails when it is answered.
            let _ = answered.recv_timeout(LONGEST);
        }
    }
}

fn write(orders: &Receiver<Order>) {
    for order in orders {
        if let Order::Write(line) = order {
            // In one piece if that is possible, as the program writes there too. Standard error may be closed: that
            // must not end the supervisor.
            let _ = patient::write_all(&mut std::io::stderr(), line.as_bytes());
        }
    }
}

/// What `--quiet` and `--verbose` show.
pub fn level(quiet: bool, verbose: bool) -> LevelFilter {
    match (quiet, verbose) {
        (true, _) => LevelFilter::Error,
        (_, true) => LevelFilter::Debug,
        _ => LevelFilter::Info,
    }
}

/// Shows messages of this level and above from now on.
///
/// # Errors
/// If no thread can be started for them.
pub fn show(level: LevelFilter) -> std::io::Result<()> {
    let (sender, orders) = sync_channel(MOST_WAITING);
    // Signals are for others.
    let blocked = signal::block_all();
    std::thread::Builder::new()
        .name("messages".to_owned())
        .spawn(move || write(&orders))?;
    drop(blocked);
    // There are no others.
    let _ = ORDERS.set(sender);
    let _ = log::set_logger(&StandardError);
    log::set_max_level(level);
    Ok(())
}

/// Prints a line whatever the level is.
pub fn print(line: &str) {
    let line = format!("memfold: {line}\n");
    let _ = ORDERS.get().map(|orders| orders.send(Order::Write(line)));
}

/// Waits until all was written. For when memfold holds no program any more.
pub fn flush() {
    let (answer, answered) = sync_channel(0);
    if let Some(Ok(())) = ORDERS.get().map(|orders| orders.send(Order::Flush(answer))) {
        // Fails when it is answered.
        let _ = answered.recv();
    }
}
