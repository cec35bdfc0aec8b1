//! The acceptor: lets helpers in, and notices when their programs are gone.
//!
//! A peer is identified when its connection is accepted, by a pidfd and not by its PID. Only descendants of
//! this process, and processes that a user attached, may send a hello; other connections are closed and counted. What a hello says is untrusted
//! input ([`crate::supervised::helper::admission`]).

use crate::supervised::fault::listen::Handlers;
use crate::supervised::group::Group;
use crate::supervised::helper::discard::Discard;
use crate::supervised::helper::guests::Guests;
use crate::supervised::helper::late::Switch;
use crate::supervised::helper::newcomers::{self, Look, Newcomers};
use crate::supervised::helper::peer::Peer;
use crate::supervised::helper::pending::{FIRST_TOKEN, PendingPeer, PendingPeers};
use crate::supervised::kernel::Ports;
use crate::supervised::util::fd_pressure;
use crate::time::Instant;
use memfold_sys::epoll::Epoll;
use memfold_sys::hello::{Hello, TRACES};
use memfold_sys::is_shortage;
use memfold_sys::process::{self, Process};
use memfold_sys::socket;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Tokens of the listeners; those of address spaces count from 1 and never come near.
const LISTENERS: [u64; 2] = [0, u64::MAX];

/// As many as are needed to attach a program, and more.
const DESCRIPTORS_TO_ATTACH: usize = 16;

/// How long programs wait for descriptors before they are sent away.
const SHORTAGE_PATIENCE: Duration = Duration::from_secs(2);

/// How many are accepted from a listener before others have a turn.
const MOST_AT_A_TIME: usize = 16;

/// Between two sweeps.
const SWEEP: Duration = Duration::from_secs(1);

/// After so many strangers of a user between two sweeps, further connections of that user are not looked at.
const MOST_LOOKS: u32 = 100;

/// With so many users whose descriptors cannot be closed, no other's are taken.
const MOST_BANNED: usize = 8;

/// So many programs that cannot be managed are told of one by one.
const MOST_WARNINGS: u32 = 10;

/// A program that said hello.
#[derive(Debug)]
struct Newcomer {
    peer: Peer,
    user: u32,
    hello: Hello,
    descriptors: [OwnedFd; 2],
}

/// The acceptor's thread.
pub(crate) struct Acceptor {
    pub(crate) group: Arc<Group>,
    pub(crate) handlers: Arc<Handlers>,
    pub(crate) ports: Arc<Ports>,
    pub(crate) discard: Discard,
    guests: Arc<Guests>,
    switch: Arc<Switch>,
    listeners: [OwnedFd; 2],
    epoll: Epoll,
    sockets: HashMap<u64, OwnedFd>,
    pending: PendingPeers<Peer>,
    newcomers: Newcomers<Newcomer>,
    /// Users whose programs sent descriptors that cannot be closed.
    banned: HashSet<u32>,
    /// How many strangers of a user were looked at since the last sweep.
    looks: HashMap<u32, u32>,
    own_user: u32,
    /// Since when descriptors are short.
    short_since: Option<Instant>,
    said_short: bool,
    warnings: u32,
    /// Given up for a moment to accept and close a connection.
    spare: Option<OwnedFd>,
}

impl Acceptor {
    pub(crate) fn new(
        group: Arc<Group>,
        handlers: Arc<Handlers>,
        ports: Arc<Ports>,
        listeners: [OwnedFd; 2],
        (guests, switch): (Arc<Guests>, Arc<Switch>),
    ) -> io::Result<Acceptor> {
        let epoll = Epoll::new()?;
        for (listener, token) in listeners.iter().zip(LISTENERS) {
            epoll.add(listener.as_fd(), token)?;
        }
        Ok(Acceptor {
            group,
            handlers,
            ports,
            discard: Discard::default(),
            guests,
            switch,
            spare: listeners[0].try_clone().ok(),
            listeners,
            epoll,
            sockets: HashMap::new(),
            pending: PendingPeers::new(),
            newcomers: Newcomers::new(),
            banned: HashSet::new(),
            looks: HashMap::new(),
            own_user: process::own_user(),
            short_since: None,
            said_short: false,
            warnings: 0,
        })
    }

    /// Runs until the group stops. Known peers come first, then connections to the path, which only the
    /// supervisor's own user can make, then those to the abstract name, which any user can; a few at a time.
    pub(crate) fn run(&mut self) {
        let mut ready = Vec::new();
        let mut swept = Instant::now();
        while !self.group.stopping.load(Ordering::Relaxed) {
            let longest = match self.newcomers.len() {
                0 => Duration::from_millis(500),
                _ => newcomers::PAUSE,
            };
            if self.epoll.wait(&mut ready, Some(longest)).is_err() {
                crate::time::sleep(Duration::from_millis(1));
            }
            for token in ready.iter().filter(|token| !LISTENERS.contains(token)) {
                if *token >= FIRST_TOKEN {
                    self.hear(*token);
                } else {
                    self.see_off(*token);
                }
            }
            for (listener, token) in LISTENERS.iter().enumerate() {
                if ready.contains(token) {
                    self.let_in(listener);
                }
            }
            if let Some(newcomer) = self.newcomers.next(self.look_for_room()) {
                self.admit_or_warn(newcomer);
            }
            for late in self.pending.take_late(Instant::now()) {
                self.warn(late.identity.process.pid(), &"it did not say hello in time");
            }
            if swept.elapsed() >= SWEEP {
                swept = Instant::now();
                self.looks.clear();
                // A process that keeps the other end open keeps nothing here.
                let group = &self.group;
                self.sockets.retain(|id, _| group.space(*id).is_some());
            }
        }
    }

    fn let_in(&mut self, listener: usize) {
        for _ in 0..MOST_AT_A_TIME {
            match socket::accept(self.listeners[listener].as_fd()) {
                Ok(Some(connection)) => {
                    if let Err(error) = self.look_at(connection) {
                        log::debug!("a connection is refused: {error}");
                        self.refuse();
                    }
                }
                Ok(None) => return,
                Err(error) if is_shortage(&error) && self.may_wait() => return,
                Err(error) if is_shortage(&error) => self.hang_up(listener),
                Err(error) => {
                    log::debug!("a connection is lost: {error}");
                    return;
                }
            }
        }
    }

    /// Identifies a peer before it is listened to. It may be stopped before it says hello: no thread waits
    /// for it.
    fn look_at(&mut self, connection: OwnedFd) -> io::Result<()> {
        let peer = socket::peer(connection.as_fd())?;
        let user = peer.uid;
        if !self.may_look(user) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let (group, guests) = (self.group.clone(), self.guests.clone());
        let identify = || {
            let process = Process::of_peer(connection.as_fd(), peer)?;
            let is_ours = is_known_child(&group, &process)
                || guests.includes(&process)
                || process.descends_from_here()?;
            Ok((is_ours, process))
        };
        let process = loop {
            match identify() {
                Ok((true, process)) => break process,
                Ok((false, _)) => {
                    *self.looks.entry(user).or_default() += 1;
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                Err(error) if is_shortage(&error) && self.may_wait() => {}
                Err(error) => return Err(error),
            }
        };
        let identity = Peer {
            connection,
            process: Arc::new(process),
        };
        self.expect(PendingPeer::new(user, identity))
    }

    /// Whether a user's connection is worth a look at its process, which takes longer than to hang up.
    fn may_look(&self, user: u32) -> bool {
        user == self.own_user
            || self.banned.len() < MOST_BANNED
                && !self.banned.contains(&user)
                && self
                    .looks
                    .get(&user)
                    .is_none_or(|looks| *looks < MOST_LOOKS)
    }

    /// Waits for a hello.
    fn expect(&mut self, peer: PendingPeer<Peer>) -> io::Result<()> {
        let token = self.pending.next_token();
        self.epoll.add(peer.identity.connection.as_fd(), token)?;
        // Closed, it is not watched any more.
        if self.pending.add(peer).is_some() {
            self.refuse();
        }
        Ok(())
    }

    fn refuse(&self) {
        let refused = &self.group.resources.counters.connections_refused;
        refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Descriptors are short. Whether that may pass: then they are waited for, for a moment here.
    fn may_wait(&mut self) -> bool {
        self.group.resources.note_shortage();
        let since = *self.short_since.get_or_insert_with(Instant::now);
        let may_wait = since.elapsed() < SHORTAGE_PATIENCE;
        if may_wait {
            crate::time::sleep(fd_pressure::PAUSE);
        } else if !std::mem::replace(&mut self.said_short, true) {
            log::warn!(
                "memfold has too few file descriptors for more programs; these run unmanaged, outside the \
                 limit. Raise the hard limit (ulimit -Hn) before memfold starts"
            );
        }
        may_wait
    }

    /// There is no descriptor for a new connection, which must not wait for ever: it is closed.
    fn hang_up(&mut self, listener: usize) {
        drop(self.spare.take());
        // Closed at once.
        if let Ok(Some(_)) = socket::accept(self.listeners[listener].as_fd()) {
            self.refuse();
        } else {
            crate::time::sleep(fd_pressure::PAUSE);
        }
        self.spare = self.listeners[listener].try_clone().ok();
    }

    /// A peer says hello, or is gone.
    fn hear(&mut self, token: u64) {
        let Some(peer) = self.pending.take(token) else {
            return;
        };
        // Fails only if it is not there.
        let _ = self.epoll.remove(peer.identity.connection.as_fd());
        // What a hello brings is lost where there is no room for it.
        if !self.has_room(&peer.identity.connection) {
            if peer.is_late(Instant::now()) || !self.may_wait() || self.expect(peer).is_err() {
                self.refuse();
            }
            return;
        }
        self.short_since = None;
        let process = peer.identity.process.clone();
        if let Err(error) = self.attach(peer) {
            self.warn_unless_gone(&process, &error);
        }
    }

    /// Whether there are descriptors to attach a program with. They are tried where there may be few.
    fn has_room(&self, any: &OwnedFd) -> bool {
        /// What the supervisor has by itself, at most, and for each program and peer.
        const OWN: usize = 256;
        const EACH: usize = 16;
        let known = OWN + EACH * (self.sockets.len() + self.pending.len() + self.newcomers.len());
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        if limit.is_none_or(|limit| limit > 2 * known as u64) {
            return true;
        }
        let room: io::Result<Vec<OwnedFd>> = (0..DESCRIPTORS_TO_ATTACH)
            .map(|_| any.try_clone())
            .collect();
        room.is_ok()
    }

    /// A program says hello. It may be lent what it needs to say it again.
    fn attach(&mut self, mut peer: PendingPeer<Peer>) -> io::Result<()> {
        let (hello, descriptors) = socket::receive_hello(peer.identity.connection.as_fd())?;
        let (user, is_lent) = (peer.user, peer.is_lent);
        let descriptors = self.sort_out(descriptors, user);
        if hello.refused == TRACES {
            self.switch.leave_off();
            return Ok(());
        }
        if hello.refused != 0 {
            peer.identity.lend(hello.refused, is_lent)?;
            peer.is_lent = true;
            return self.expect(peer);
        }
        // A program that the supervisor has start its helper has its memory already, and is traced meanwhile.
        let is_new = hello.inherited == 0 && hello.relative == 0 && !self.guests.is_tracing();
        let newcomer = Newcomer {
            peer: peer.identity,
            user,
            hello,
            descriptors: descriptors?,
        };
        let admitted = if is_new {
            self.newcomers.add(self.look_for_room(), newcomer)
        } else {
            Some(newcomer)
        };
        if let Some(newcomer) = admitted {
            self.admit_or_warn(newcomer);
        }
        Ok(())
    }

    fn look_for_room(&self) -> Look {
        let resources = &self.group.resources;
        Look {
            now: Instant::now(),
            is_room: resources.resident_bytes() < resources.resident_limit_bytes(),
            pages_out: resources.counters.pages_out.load(Ordering::Relaxed),
        }
    }

    fn admit_or_warn(&mut self, newcomer: Newcomer) {
        let process = newcomer.peer.process.clone();
        let admitted = self
            .admit(
                newcomer.peer,
                newcomer.user,
                &newcomer.hello,
                newcomer.descriptors,
            )
            .and_then(|(id, connection)| {
                self.epoll.add(connection.as_fd(), id)?;
                self.sockets.insert(id, connection);
                Ok(())
            });
        if let Err(error) = admitted {
            self.warn_unless_gone(&process, &error);
        }
    }

    fn warn_unless_gone(&mut self, process: &Process, error: &io::Error) {
        if error.kind() != io::ErrorKind::UnexpectedEof && !process.has_ended() {
            self.warn(process.pid(), error);
        }
    }

    /// The two userfaultfds of a hello. Whatever else came is not touched, but closed by a thread
    /// that no other waits for.
    fn sort_out(&mut self, descriptors: Vec<OwnedFd>, user: u32) -> io::Result<[OwnedFd; 2]> {
        let is_ours = |one: &OwnedFd| memfold_sys::uffd::is_userfaultfd(one.as_fd());
        if descriptors.iter().all(is_ours) {
            return descriptors
                .try_into()
                .map_err(|_| io::Error::other("its helper sent no userfaultfds"));
        }
        if !self.discard.close(descriptors) {
            self.banned.insert(user);
        }
        Err(io::Error::other(
            "its helper sent descriptors that are no userfaultfds",
        ))
    }

    fn warn(&mut self, pid: i32, why: &dyn std::fmt::Display) {
        self.warnings += 1;
        if self.warnings <= MOST_WARNINGS {
            log::warn!("process {pid} runs unmanaged, outside the limit: {why}");
        }
        if self.warnings == MOST_WARNINGS {
            log::warn!("further processes that run unmanaged are counted only");
        }
    }

    /// A helper's socket closed: its thread ended, and with it the address space, or soon. It is
    /// kept until the kernel says that it is gone, as another process may still be in it.
    fn see_off(&mut self, id: u64) {
        if let Some(connection) = self.sockets.remove(&id) {
            // Fails only if it is not there.
            let _ = self.epoll.remove(connection.as_fd());
        }
        if let Some(space) = self.group.space(id) {
            space.life.detach();
            space.leave();
        }
    }
}

/// Whether the parent of a process is managed already, and so descends from here. A PID is not given again
/// before its process is reaped. So one that was the parent's after a process of that PID was found, and
/// before that is found not to be reaped, is that process's.
pub(crate) fn is_known_child(group: &Group, process: &Process) -> bool {
    let Some(parent) = process.parent() else {
        return false;
    };
    group.spaces().iter().any(|space| {
        let inspector = space.inspector();
        let known = inspector.filter(|inspector| inspector.pid() == parent);
        known.is_some_and(|inspector| {
            process.parent() == Some(parent) && inspector.process().signal(0).is_ok()
        })
    })
}
