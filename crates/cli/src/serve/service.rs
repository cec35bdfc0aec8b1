//! What a disk waits for: clients, questions, commands, the signal that ends it.

use super::instance_folder::InstanceFolder;
use super::listener::Listener;
use super::signals::die_by_next;
use crate::control::{self, Answer, Command, Executor};
use crate::disk_report::{DiskSnapshot, DiskStatistics};
use crate::instance::Instance;
use crate::run::cpu_time::cpu_seconds;
use memfold_disk::nbd::Server;
use memfold_disk::{Disk, DiskUsage};
use memfold_pager::MappedSource;
use nix::sys::signalfd::SignalFd;
use rustix::event::{PollFd, PollFlags, poll};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause where there are no descriptors for a client. Longer takes less CPU time and lets clients wait.
const PAUSE: Duration = Duration::from_millis(100);

/// A disk and its clients. Dropping it hangs up on all clients.
pub struct Service {
    /// Where clients connect.
    pub listener: Option<Listener>,
    /// Where clients connect, and the block device, for display.
    pub place: String,
    /// What ends it.
    pub signals: SignalFd,
    /// Where `stat`, `top` and `swapoff` ask.
    pub folder: Option<InstanceFolder>,
    /// The clients.
    pub server: Server<MappedSource>,
    /// The disk.
    pub disk: Arc<Disk<MappedSource>>,
    /// When it began.
    pub started: Instant,
}

/// The clients so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct Clients {
    came: u64,
    refused: u64,
    /// Whether one could not be accepted.
    waited: bool,
}

impl Clients {
    /// Counts one that came, and was disconnected where this failed.
    fn note(&mut self, welcomed: io::Result<()>) {
        self.came += 1;
        let Err(error) = welcomed else { return };
        if self.refused == 0 {
            log::warn!(
                "a client was disconnected ({error}), and further ones are only counted; close \
                 connections, or raise `ulimit -n`"
            );
        }
        self.refused += 1;
    }

    /// Notes that one could not be accepted. It is not disconnected, and is tried again.
    fn note_waiting(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.waited, true) {
            log::warn!(
                "cannot accept a client ({error}), which waits; close connections, or raise \
                 `ulimit -n`"
            );
        }
    }

    /// The statistics of a disk that had these clients, with the CPU time so far.
    pub fn statistics(self, usage: DiskUsage) -> DiskStatistics {
        DiskStatistics {
            usage,
            connections: self.came,
            connections_refused: self.refused,
            cpu_seconds: cpu_seconds(),
        }
    }
}

impl Service {
    /// Serves until a signal comes.
    ///
    /// # Errors
    ///
    /// If nothing can be waited for.
    pub fn until_signal(self) -> io::Result<Clients> {
        let mut clients = Clients::default();
        loop {
            let mut sources = vec![self.signals.as_fd()];
            sources.extend(self.listener.iter().map(Listener::as_fd));
            sources.extend(self.folder.iter().flat_map(InstanceFolder::descriptors));
            let watched = sources.into_iter();
            let mut watched: Vec<_> = watched
                .map(|source| PollFd::from_borrowed_fd(source, PollFlags::IN))
                .collect();
            match poll(&mut watched, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            if watched[0].revents().contains(PollFlags::IN) {
                drop(watched);
                die_by_next(self.signals);
                self.disk.end_waits();
                return Ok(clients);
            }
            if let Some(folder) = &self.folder {
                let snapshot = || self.snapshot(clients);
                folder.statistics.answer(snapshot);
                control::serve(&folder.commands, || on_disk(self.disk.clone()));
            }
            if let Some(listener) = &self.listener {
                self.welcome(listener, &mut clients);
            }
        }
    }

    /// Takes the next client in, if there is one.
    fn welcome(&self, listener: &Listener, clients: &mut Clients) {
        match listener.accept() {
            Ok(None) => {}
            Ok(Some(connection)) => clients.note(self.server.welcome(connection)),
            Err(error) => {
                clients.note_waiting(&error);
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn snapshot(&self, clients: Clients) -> Instance {
        DiskSnapshot {
            pid: std::process::id(),
            address: self.place.clone(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            connections_now: self.server.connections() as u64,
            statistics: clients.statistics(self.disk.usage()),
        }
        .into()
    }
}

/// Executes a command on a disk.
fn on_disk(disk: Arc<Disk<MappedSource>>) -> Executor {
    Box::new(move |command| match command {
        Command::SwapOff => match disk.swap_off() {
            Ok(blocks) => Ok(Answer::Pages(blocks)),
            Err(error) => Err(error.to_string()),
        },
        Command::Limit { .. } | Command::Reclaim { .. } | Command::Mappings { .. } => {
            Err("the limit of a disk is set when it starts, by memfold serve --limit".to_owned())
        }
        Command::Detach { .. } => Err("a disk has no programs".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_waits_is_not_disconnected() {
        let mut clients = Clients::default();
        let error = || io::Error::from(rustix::io::Errno::MFILE);
        for _ in 0..10 {
            clients.note_waiting(&error());
        }
        clients.note(Ok(()));
        clients.note(Err(error()));
        let statistics = clients.statistics(DiskUsage::default());
        assert_eq!(
            (statistics.connections, statistics.connections_refused),
            (2, 1)
        );
    }
}
