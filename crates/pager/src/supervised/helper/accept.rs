//! The acceptor: lets helpers in, and notices when their programs are gone.
//!
//! A peer is identified when its connection is accepted, by a pidfd and not by its PID. Only descendants of
//! this process, and processes that a user attached, may send a hello; other connections are closed and counted. What a hello says is untrusted
//! input ([`crate::supervised::helper::admission`]).

use crate::supervised::fault::listen::Handlers;
use crate::supervised::group::Group;
use crate::supervised::helper::discard::{Connection, Discard, Sent, Whose};
use crate::supervised::helper::guests::Guests;
use crate::supervised::helper::late::Switch;
use crate::supervised::helper::newcomers::{self, Look, Newcomers};
use crate::supervised::helper::peer::Peer;
use crate::supervised::helper::pending::{FIRST_TOKEN, PendingPeer, PendingPeers};
use crate::supervised::kernel::Ports;
use crate::supervised::util::fd_pressure;
use crate::time::Instant;
use memfold_sys::epoll::{Epoll, Wake};
use memfold_sys::hello::{Hello, TOKEN};
use memfold_sys::is_shortage;
use memfold_sys::process::{self, Process};
use memfold_sys::socket;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Tokens of the listeners; those of address spaces count from 1 and never come near.
const LISTENERS: [u64; 2] = [0, u64::MAX];

/// Token of what wakes the acceptor.
const NEWS: u64 = u64::MAX - 1;

/// The listener to which any user can connect.
const ABSTRACT: usize = 1;

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

/// So many programs that cannot be managed are told of one by one.
const MOST_WARNINGS: u32 = 10;

/// A program that said hello.
#[derive(Debug)]
struct Newcomer {
    peer: Peer,
    user: u32,
    hello: Hello,
    descriptors: [Sent; 2],
}

/// The child of a prepared fork that said hello, and waits for its page states. Its parent's threads decide how long that
/// takes, so no other peer waits for it.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub peer: Peer,
    pub user: u32,
    pub hello: Hello,
    pub trash: Sent,
    pub at: Instant,
}

/// The acceptor's thread.
pub(crate) struct Acceptor {
    pub(crate) group: Arc<Group>,
    pub(crate) handlers: Arc<Handlers>,
    pub(crate) ports: Arc<Ports>,
    pub(crate) discard: Discard,
    guests: Arc<Guests>,
    switch: Arc<Switch>,
    /// To close one closes those that wait to be accepted, and what they sent.
    listeners: [Sent; 2],
    is_shut: [bool; 2],
    epoll: Epoll,
    sockets: HashMap<u64, Connection>,
    pending: PendingPeers<Peer>,
    newcomers: Newcomers<Newcomer>,
    pub(crate) arrived: Vec<Arrived>,
    /// Wakes this thread where one of those may have its page states.
    wake: Arc<Wake>,
    /// Since when it has not listened, as far as that is not counted yet.
    busy_since: Instant,
    /// How many strangers of a user were looked at since the last sweep.
    looks: HashMap<u32, u32>,
    own_user: u32,
    /// Since when descriptors are short.
    short_since: Option<Instant>,
    said_short: bool,
    warnings: u32,
    /// Given up for a moment to accept and close a connection.
    spare: Option<Epoll>,
}

impl Acceptor {
    pub(crate) fn new(
        group: Arc<Group>,
        handlers: Arc<Handlers>,
        ports: Arc<Ports>,
        listeners: [OwnedFd; 2],
        (guests, switch): (Arc<Guests>, Arc<Switch>),
    ) -> io::Result<Acceptor> {
        let (epoll, own_user) = (Epoll::new()?, process::own_user());
        let descriptors = most_descriptors();
        let discard = Discard::new(own_user, descriptors);
        let listeners = listeners.map(|listener| Sent::new(&discard, own_user, listener));
        for (listener, token) in listeners.iter().zip(LISTENERS) {
            epoll.add(listener.as_fd(), token)?;
        }
        let wake = Arc::new(Wake::new()?);
        epoll.add(wake.as_fd(), NEWS)?;
        let waking = wake.clone();
        group.expected_children.set_wake(move || waking.wake());
        Ok(Acceptor {
            group,
            handlers,
            ports,
            discard,
            guests,
            switch,
            spare: Epoll::new().ok(),
            listeners,
            is_shut: [false; 2],
            epoll,
            sockets: HashMap::new(),
            pending: PendingPeers::new(descriptors),
            newcomers: Newcomers::new(),
            arrived: Vec::new(),
            wake,
            busy_since: Instant::now(),
            looks: HashMap::new(),
            own_user,
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
            self.note_busy();
            if self.epoll.wait(&mut ready, Some(longest)).is_err() {
                crate::time::sleep(Duration::from_millis(1));
            }
            self.busy_since = Instant::now();
            for token in ready.iter().filter(|token| !LISTENERS.contains(token)) {
                if *token == NEWS {
                    self.wake.clear();
                } else if *token >= FIRST_TOKEN {
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
            self.admit_arrived();
            if let Some(newcomer) = self.newcomers.next(self.look_for_room()) {
                self.admit_or_warn(newcomer);
            }
            for late in self.pending.take_late(Instant::now()) {
                self.unwatch(&late.identity.connection);
                self.warn(late.identity.process.pid(), &"it did not say hello in time");
            }
            if swept.elapsed() >= SWEEP {
                swept = Instant::now();
                self.looks.clear();
                self.discard.go_on();
                for listener in 0..LISTENERS.len() {
                    if self.is_shut[listener] {
                        self.turn_away(listener);
                    }
                }
                // A process that keeps the other end open keeps nothing here.
                let is_gone = |id: &u64| self.group.space(*id).is_none();
                let gone: Vec<u64> = self.sockets.keys().copied().filter(is_gone).collect();
                for id in gone {
                    self.drop_socket(id);
                }
            }
        }
    }

    /// Counts the time since this thread listened last.
    pub(crate) fn note_busy(&mut self) {
        let now = Instant::now();
        let since = std::mem::replace(&mut self.busy_since, now);
        self.group
            .expected_children
            .note_busy(now.duration_since(since));
    }

    fn let_in(&mut self, listener: usize) {
        for _ in 0..MOST_AT_A_TIME {
            self.shut_flooded();
            if self.is_shut[listener] {
                return;
            }
            match self.accept(listener) {
                Ok(Some((connection, peer))) => {
                    if let Err(error) = self.look_at(connection, peer) {
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

    /// The next connection, and its peer.
    fn accept(
        &self,
        listener: usize,
    ) -> io::Result<Option<(Connection, io::Result<socket::Peer>)>> {
        /// Of a connection without a peer.
        const NO_USER: u32 = u32::MAX;
        let accepted = socket::accept(self.listeners[listener].as_fd())?;
        Ok(accepted.map(|connection| {
            let peer = socket::peer(connection.as_fd());
            let user = peer.as_ref().map_or(NO_USER, |peer| peer.uid);
            (Connection::new(&self.discard, user, connection), peer)
        }))
    }

    /// Where descriptors of peers wait to be closed that would soon use up memfold's, nothing more comes by the
    /// listener that others can reach, or by either if they are of memfold's own user.
    fn shut_flooded(&mut self) {
        let by_own = self.discard.is_flooded(Whose::OwnUser);
        if !by_own && !self.discard.is_flooded(Whose::Others) {
            return;
        }
        let mut is_news = false;
        for listener in if by_own { 0 } else { ABSTRACT }..LISTENERS.len() {
            if std::mem::replace(&mut self.is_shut[listener], true) {
                continue;
            }
            is_news = true;
            // Fail only if it is not there.
            let _ = self.epoll.remove(self.listeners[listener].as_fd());
            let _ = socket::stop_listening(self.listeners[listener].as_fd());
            self.turn_away(listener);
        }
        if is_news {
            let (whose, which) = if by_own {
                ("memfold's own user", "further programs")
            } else {
                (
                    "other users",
                    "programs that change their user or their root",
                )
            };
            log::warn!(
                "processes of {whose} sent memfold hundreds of descriptors that take too long to close: {which} run \
                 unmanaged, outside the limit, until the run ends. End those processes, and start the run anew"
            );
        }
    }

    /// Those that had connected by then wait for an answer.
    fn turn_away(&self, listener: usize) {
        while let Ok(Some(_)) = self.accept(listener) {
            self.refuse();
        }
    }

    /// Identifies a peer before it is listened to. It may be stopped before it says hello: no thread waits
    /// for it.
    fn look_at(
        &mut self,
        connection: Connection,
        peer: io::Result<socket::Peer>,
    ) -> io::Result<()> {
        let peer = peer?;
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
        socket::let_descriptors_through(connection.as_fd());
        let identity = Peer {
            connection,
            process: Arc::new(process),
        };
        self.expect(PendingPeer::new(user, identity))
    }

    /// Whether a user's connection is worth a look at its process, which takes longer than to hang up.
    fn may_look(&self, user: u32) -> bool {
        let looks = self.looks.get(&user);
        self.discard.has_room(user)
            && (user == self.own_user || looks.is_none_or(|looks| *looks < MOST_LOOKS))
    }

    /// Waits for a hello.
    fn expect(&mut self, peer: PendingPeer<Peer>) -> io::Result<()> {
        let token = self.pending.next_token();
        self.epoll.add(peer.identity.connection.as_fd(), token)?;
        if let Some(gone) = self.pending.add(peer) {
            self.unwatch(&gone.identity.connection);
            self.refuse();
        }
        Ok(())
    }

    /// Has the end of a helper be noticed.
    pub(crate) fn watch(&self, connection: &Connection, id: u64) -> io::Result<()> {
        self.epoll.add(connection.as_fd(), id)
    }

    /// Before a connection is dropped, after which it may stay open until a thread closes it.
    pub(crate) fn unwatch(&self, connection: &Connection) {
        // Fails only if it is not there.
        let _ = self.epoll.remove(connection.as_fd());
    }

    fn drop_socket(&mut self, id: u64) {
        if let Some(connection) = self.sockets.remove(&id) {
            self.unwatch(&connection);
        }
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
        // Closed at once, unless it holds descriptors.
        if let Ok(Some(_)) = self.accept(listener) {
            self.refuse();
        } else {
            crate::time::sleep(fd_pressure::PAUSE);
        }
        self.spare = Epoll::new().ok();
    }

    /// A peer says hello, or is gone.
    fn hear(&mut self, token: u64) {
        let Some(peer) = self.pending.take(token) else {
            return;
        };
        self.unwatch(&peer.identity.connection);
        // What a hello brings is lost where there is no room for it.
        if !self.has_room() {
            self.hear_again(peer);
            return;
        }
        let process = peer.identity.process.clone();
        if let Err(error) = self.attach(peer) {
            self.warn_unless_gone(&process, &error);
        }
    }

    /// Descriptors are short: waits for the same hello once more, which is still in the socket.
    fn hear_again(&mut self, peer: PendingPeer<Peer>) {
        if peer.is_late(Instant::now()) || !self.may_wait() || self.expect(peer).is_err() {
            self.refuse();
        }
    }

    /// Whether there are descriptors to attach a program with. They are tried where there may be few.
    fn has_room(&self) -> bool {
        /// What the supervisor has by itself, at most, and for each program and peer.
        const OWN: usize = 256;
        const EACH: usize = 16;
        let waiting = self.pending.len() + self.newcomers.len() + self.arrived.len();
        let peers = self.group.space_count() + waiting;
        let known = OWN + EACH * peers + self.discard.len();
        if most_descriptors().is_none_or(|limit| limit > 2 * known as u64) {
            return true;
        }
        let room: io::Result<Vec<OwnedFd>> = (0..DESCRIPTORS_TO_ATTACH)
            .map(|_| self.listeners[0].as_fd().try_clone_to_owned())
            .collect();
        room.is_ok()
    }

    /// A program says hello. It may be lent what it needs to say it again.
    fn attach(&mut self, mut peer: PendingPeer<Peer>) -> io::Result<()> {
        let (user, is_lent) = (peer.user, peer.is_lent);
        if !self.discard.has_room(user) {
            return Err(io::Error::other(
                "descriptors that programs of its user sent to memfold take too long to close",
            ));
        }
        let connection = peer.identity.connection.as_fd();
        let (hello, sent) = socket::peek_hello(connection);
        let sent = sent.into_iter();
        let sent: Vec<Sent> = sent
            .map(|one| Sent::new(&self.discard, user, one))
            .collect();
        // What holds other descriptors stays in the connection, and goes with that.
        if hello.as_ref().is_err_and(is_shortage) {
            self.hear_again(peer);
            return Ok(());
        }
        self.short_since = None;
        let hello = hello?;
        socket::take_hello(connection)?;
        let descriptors = userfaultfds(sent);
        if self.switch.note(hello.refused) {
            return Ok(());
        }
        if hello.refused != 0 {
            peer.identity.lend(hello.refused, is_lent)?;
            peer.is_lent = true;
            return self.expect(peer);
        }
        let (peer, descriptors) = (peer.identity, descriptors?);
        if hello.inherited & TOKEN != 0 {
            let [own, trash] = descriptors;
            let at = Instant::now();
            let arrived = Arrived {
                peer,
                user,
                hello,
                trash,
                at,
            };
            return self.await_page_states(arrived, own);
        }
        // A program that the supervisor has start its helper has its memory already, and is traced meanwhile.
        let is_new = hello.inherited == 0 && hello.relative == 0 && !self.guests.is_tracing();
        let newcomer = Newcomer {
            peer,
            user,
            hello,
            descriptors,
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
        let admitted = self.admit(
            newcomer.peer,
            newcomer.user,
            &newcomer.hello,
            newcomer.descriptors,
        );
        self.keep_or_warn(&process, admitted);
    }

    /// Keeps the connection of a program that was admitted, which is watched.
    pub(crate) fn keep_or_warn(
        &mut self,
        process: &Process,
        admitted: io::Result<(u64, Connection)>,
    ) {
        let kept = admitted.map(|(id, connection)| self.sockets.insert(id, connection));
        if let Err(error) = kept {
            self.warn_unless_gone(process, &error);
        }
    }

    fn warn_unless_gone(&mut self, process: &Process, error: &io::Error) {
        if error.kind() != io::ErrorKind::UnexpectedEof && !process.has_ended() {
            self.warn(process.pid(), error);
        }
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

    /// A helper's socket closed: its thread ended, mostly with the program. The address space is kept until the kernel
    /// says that it is gone: the helper alone may have ended, or another process may still use the memory.
    fn see_off(&mut self, id: u64) {
        self.drop_socket(id);
        if let Some(space) = self.group.space(id) {
            space.life.detach();
            if space.is_gone() {
                space.leave();
            } else if !space.leave_if_ended() {
                // It may be ending: the governor looks.
                self.group.resources.activity.note();
            }
        }
    }
}

/// How many descriptors this process may have; `None` is no limit.
fn most_descriptors() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

/// The two userfaultfds of a hello. Whatever else came is not touched.
fn userfaultfds(sent: Vec<Sent>) -> io::Result<[Sent; 2]> {
    let is_userfaultfd = |one: &Sent| memfold_sys::uffd::is_userfaultfd(one.as_fd());
    if !sent.iter().all(is_userfaultfd) {
        return Err(io::Error::other(
            "its helper sent descriptors that are no userfaultfds",
        ));
    }
    sent.try_into()
        .map_err(|_| io::Error::other("its helper sent no userfaultfds"))
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
