//! Closes what peers sent, and the connections that hold more of it, by threads of its own.
//!
//! To close a descriptor may take any time: its file system may be a program of the sender's, a socket may linger. The same
//! goes for a connection with unread messages that hold descriptors. The acceptor keeps what comes from peers as [`Sent`] and
//! [`Connection`], which come here wherever they are dropped.

use crate::sync::lock;
use memfold_sys::socket;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, mpsc};

/// Threads that close what programs of one user sent. With more, one user can hold up more threads; fewer are held up sooner.
const THREADS_OF_USER: usize = 4;
/// Threads for all users but memfold's own together. More keep more stacks; fewer let fewer users hold up all others.
const THREADS_OF_OTHERS: usize = 32;
/// Threads that wait for work. More keep more stacks; with fewer, more are started.
const THREADS_IDLE: usize = 1;
/// Things of a user that may wait before nothing more is taken from that user's programs. More takes more descriptors; fewer
/// refuses programs that start while these threads lack a CPU.
const WAITING_OF_USER: usize = 64;
/// Things that may wait, of memfold's own user or of all others, before those are not listened to any more; fewer where this
/// process may have few descriptors ([`SHARE`]). More takes more descriptors; with fewer, fewer users can bring this about.
const WAITING: u64 = 512;
/// Descriptors of this process for each of them that may wait.
const SHARE: u64 = 8;

/// What closes a descriptor when it is dropped.
type Thing = Box<dyn Send>;
/// One for a thread, with its user.
type Job = (u32, Thing);

/// Whose things wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    OwnUser,
    Others,
}

#[derive(Default)]
struct State {
    own_user: u32,
    /// The bound of what waits.
    most_waiting: usize,
    waiting: VecDeque<Job>,
    /// Threads at work, by the users of what they close.
    working: HashMap<u32, usize>,
    idle: Vec<mpsc::Sender<Job>>,
}

impl State {
    fn may_begin(&self, user: u32) -> bool {
        let of_user = self.working.get(&user).copied().unwrap_or(0);
        let others = self
            .working
            .iter()
            .filter(|(user, _)| **user != self.own_user);
        of_user < THREADS_OF_USER
            && (user == self.own_user
                || others.map(|(_, threads)| threads).sum::<usize>() < THREADS_OF_OTHERS)
    }

    /// The next thing for which there may be a thread.
    fn take(&mut self) -> Option<Job> {
        let mut waiting = self.waiting.iter();
        let next = waiting.position(|(user, _)| self.may_begin(*user))?;
        let job = self.waiting.remove(next)?;
        *self.working.entry(job.0).or_default() += 1;
        Some(job)
    }

    fn note_end(&mut self, user: u32) {
        if let Some(threads) = self.working.get_mut(&user) {
            *threads -= 1;
        }
        self.working.retain(|_, threads| *threads > 0);
    }

    fn count(&self, counts: impl Fn(u32) -> bool) -> usize {
        self.waiting
            .iter()
            .filter(|(user, _)| counts(*user))
            .count()
    }
}

/// Closes what peers sent, by threads of its own. Clones share them.
#[derive(Clone)]
pub(crate) struct Discard(Arc<Mutex<State>>);

impl Discard {
    /// For a process with this limit of descriptors, if it has one.
    pub(crate) fn new(own_user: u32, descriptors: Option<u64>) -> Discard {
        let most = descriptors.map_or(WAITING, |count| WAITING.min(count / SHARE));
        Discard(Arc::new(Mutex::new(State {
            own_user,
            most_waiting: most as usize,
            ..State::default()
        })))
    }

    /// Has another thread drop what a peer of that user sent, some time.
    pub(crate) fn drop_later(&self, user: u32, thing: Thing) {
        lock(&self.0).waiting.push_back((user, thing));
        self.go_on();
    }

    /// Has threads begin what waits. Again after a while, as none may be to be had.
    pub(crate) fn go_on(&self) {
        let mut state = lock(&self.0);
        while let Some(job) = state.take() {
            let Some(worker) = state.idle.pop().or_else(|| self.worker()) else {
                state.note_end(job.0);
                state.waiting.push_front(job);
                return;
            };
            if let Err(mpsc::SendError(job)) = worker.send(job) {
                state.note_end(job.0);
                state.waiting.push_front(job);
            }
        }
    }

    fn worker(&self) -> Option<mpsc::Sender<Job>> {
        let (sender, jobs) = mpsc::channel::<Job>();
        let (state, of_worker) = (self.0.clone(), sender.clone());
        let work = move || {
            for job in jobs {
                let mut next = Some(job);
                while let Some((user, thing)) = next {
                    drop(thing);
                    let mut state = lock(&state);
                    state.note_end(user);
                    next = state.take();
                    if next.is_none() {
                        if state.idle.len() >= THREADS_IDLE {
                            return;
                        }
                        state.idle.push(of_worker.clone());
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("discard".into());
        thread.spawn(work).ok().map(|_| sender)
    }

    /// Whether anything more is to be taken from programs of that user.
    pub(crate) fn has_room(&self, user: u32) -> bool {
        let state = lock(&self.0);
        state.count(|other| other == user) < WAITING_OF_USER.min(state.most_waiting / 2)
    }

    /// How many things wait or are being closed.
    pub(crate) fn len(&self) -> usize {
        let state = lock(&self.0);
        state.waiting.len() + state.working.values().sum::<usize>()
    }

    /// Whether so much waits that nothing more can be taken from anyone of these.
    pub(crate) fn is_flooded(&self, by: Whose) -> bool {
        let state = lock(&self.0);
        state.count(|user| (user == state.own_user) == (by == Whose::OwnUser)) > state.most_waiting
    }
}

/// A descriptor that a peer sent, or that holds such. A thread of [`Discard`] closes it.
pub(crate) struct Sent {
    /// `None` once it is given away.
    descriptor: Option<OwnedFd>,
    user: u32,
    discard: Discard,
}

impl Sent {
    pub(crate) fn new(discard: &Discard, user: u32, descriptor: OwnedFd) -> Sent {
        Sent {
            descriptor: Some(descriptor),
            user,
            discard: discard.clone(),
        }
    }

    /// For an owner that sees to it where it is closed.
    pub(crate) fn keep(mut self) -> OwnedFd {
        self.descriptor
            .take()
            .expect("it is there until it is dropped")
    }
}

impl AsFd for Sent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let descriptor = self.descriptor.as_ref();
        descriptor.expect("it is there until it is dropped").as_fd()
    }
}

impl std::fmt::Debug for Sent {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.descriptor.fmt(formatter)
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if let Some(descriptor) = self.descriptor.take() {
            self.discard.drop_later(self.user, Box::new(descriptor));
        }
    }
}

/// The connection of a peer, which is hung up on when this is dropped. It is closed at once if nothing unread holds
/// descriptors, else as [`Sent`] is.
#[derive(Debug)]
pub(crate) struct Connection(Sent);

impl Connection {
    pub(crate) fn new(discard: &Discard, user: u32, connection: OwnedFd) -> Connection {
        Connection(Sent::new(discard, user, connection))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if socket::hang_up(self.as_fd()) {
            drop(self.0.descriptor.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{PipeReader, Read};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::{Duration, Instant};

    const OWN: u32 = 0;

    /// Takes as long to close as the test likes.
    struct Slow {
        until: Receiver<()>,
        _held: Arc<()>,
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.until.recv();
        }
    }

    /// Has so many slow things of a user dropped; they go once the result does.
    fn hold(discard: &Discard, user: u32, count: usize, held: &Arc<()>) -> Vec<Sender<()>> {
        let hold_one = |_| {
            let (sender, receiver) = channel();
            let slow = Slow {
                until: receiver,
                _held: held.clone(),
            };
            discard.drop_later(user, Box::new(slow));
            sender
        };
        (0..count).map(hold_one).collect()
    }

    fn threads(discard: &Discard) -> usize {
        lock(&discard.0).working.values().sum()
    }

    /// Whether the other end of a pipe is closed soon.
    fn is_closed(mut reader: PipeReader) -> bool {
        let (sender, receiver) = channel();
        std::thread::spawn(move || sender.send(reader.read(&mut [0]).ok()));
        receiver.recv_timeout(Duration::from_secs(5)) == Ok(Some(0))
    }

    fn wait_until(what: impl Fn() -> bool) {
        let began = Instant::now();
        while !what() {
            assert!(began.elapsed() < Duration::from_secs(10));
            crate::time::yield_now();
        }
    }

    #[test]
    fn one_users_slow_descriptors_hold_up_no_others() {
        let (discard, held) = (Discard::new(OWN, None), Arc::new(()));
        let slow = hold(&discard, 7, 3 * WAITING_OF_USER, &held);
        assert_eq!(threads(&discard), THREADS_OF_USER);
        assert!(!discard.has_room(7) && discard.has_room(8) && discard.has_room(OWN));
        for user in [8, OWN] {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(Sent::new(&discard, user, writer.into()));
            assert!(is_closed(reader), "{user}");
        }
        assert!(!discard.is_flooded(Whose::Others) && !discard.is_flooded(Whose::OwnUser));
        drop(slow);
        wait_until(|| Arc::strong_count(&held) == 1);
        assert!(discard.has_room(7));
        wait_until(|| threads(&discard) == 0);
    }

    #[test]
    fn all_others_together_hold_up_not_the_own_user() {
        let (discard, held) = (Discard::new(OWN, None), Arc::new(()));
        let slow: Vec<_> = (100..120)
            .map(|user| hold(&discard, user, WAITING_OF_USER, &held))
            .collect();
        assert_eq!(threads(&discard), THREADS_OF_OTHERS);
        assert!(discard.is_flooded(Whose::Others) && !discard.is_flooded(Whose::OwnUser));
        let (reader, writer) = std::io::pipe().unwrap();
        drop(Sent::new(&discard, OWN, writer.into()));
        assert!(is_closed(reader));
        drop(slow);
        wait_until(|| Arc::strong_count(&held) == 1);
    }

    #[test]
    fn with_few_descriptors_less_may_wait() {
        let (discard, held) = (Discard::new(OWN, Some(256)), Arc::new(()));
        let mut slow = hold(&discard, 7, THREADS_OF_USER + 15, &held);
        assert!(discard.has_room(7));
        slow.extend(hold(&discard, 7, 1, &held));
        assert!(!discard.has_room(7) && discard.has_room(8));
        slow.extend(hold(&discard, 8, THREADS_OF_USER + 16, &held));
        assert!(!discard.is_flooded(Whose::Others));
        slow.extend(hold(&discard, 8, 1, &held));
        assert!(discard.is_flooded(Whose::Others) && !discard.is_flooded(Whose::OwnUser));
        drop(slow);
        wait_until(|| Arc::strong_count(&held) == 1);
    }

    #[test]
    fn only_a_connection_with_unread_descriptors_is_closed_elsewhere() {
        use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
        let (discard, held) = (Discard::new(OWN, None), Arc::new(()));
        let slow = hold(&discard, 7, THREADS_OF_USER, &held);
        for has_descriptor in [false, true] {
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let (peer, connection) =
                rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
            if has_descriptor {
                let mut room = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = rustix::net::SendAncillaryBuffer::new(&mut room);
                let sent = [peer.as_fd()];
                assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&sent)));
                let (data, flags) = ([std::io::IoSlice::new(b"x")], SendFlags::empty());
                rustix::net::sendmsg(&peer, &data, &mut control, flags).unwrap();
            } else {
                rustix::io::write(&peer, b"x").unwrap();
            }
            drop(Connection::new(&discard, 7, connection));
            let waiting = lock(&discard.0).waiting.len();
            assert_eq!(waiting, usize::from(has_descriptor));
        }
        drop(slow);
        wait_until(|| Arc::strong_count(&held) == 1);
    }
}
