//! The fault handlers: one thread per CPU, each listening to the address spaces whose threads fault on
//! its CPU.
//!
//! Waking a thread on another CPU costs an IPI and possibly an idle exit, more than the rest of a
//! fault. So an address space is registered only with the handlers of the CPUs that its faults come
//! from. A handler samples the CPU of the faulting thread: often at first and after a sample from
//! another CPU, rarely while samples agree.
//!
//! A handler may wait for one program: for its changes of mappings to end, or for a page in the swap
//! file. So that the other programs of the CPU do not wait along, the governor relieves a handler that
//! takes long: a new thread takes over its epoll, and the old one ends once it is done with that program.

use crate::supervised::events::read::Reader;
use crate::supervised::fault::handler::{Listener, serve_space};
use crate::supervised::fault::server::Server;
use crate::supervised::group::Group;
use crate::supervised::kernel::Ports;
use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use memfold_sys::epoll::Epoll;
use memfold_sys::thread;
use std::io::{self, PipeReader};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Smallest and largest distance between two samples, in faults. Larger saves reads of `/proc` and
/// follows a migrated thread later.
const SAMPLE_NEAREST: u32 = 2;
const SAMPLE_FARTHEST: u32 = 512;
/// Consecutive samples from other CPUs after which a handler stops listening. More tolerates migrations
/// and wakes more handlers per fault.
const MISSES_TO_LEAVE: u32 = 4;
/// Milliseconds after which a handler that is busy is relieved. Longer makes other programs wait for
/// longer; shorter starts threads for pages that come from a slow disk.
const RELIEVED_AFTER: u64 = 20;
/// Most relieved threads that still run. More programs at once can make handlers wait, and more threads
/// are used.
const MOST_RELIEVED: u32 = 64;
/// The epoll token of the stop pipe, which is no address space's ID.
const STOP: u64 = u64::MAX;

/// The handlers of a group. Shared by the handler threads, the attendant and the governor; it has no
/// mutable state.
pub struct Handlers {
    group: Arc<Group>,
    posts: Vec<Post>,
    /// Number of relieved threads that still run. Relaxed: only a bound.
    relieved: AtomicU32,
    /// Reads the messages of the group's programs.
    pub reader: Reader,
    /// Hangs up when the group stops, which wakes the handlers.
    _stop: PipeReader,
}

/// The place of the thread that serves the faults of one CPU.
struct Post {
    cpu: usize,
    epoll: Epoll,
    /// The number of the thread on duty: threads with smaller ones were relieved. Relaxed, as the epoll
    /// may be served by two threads for a while.
    duty: AtomicU32,
    /// When the thread on duty began with what was ready, in milliseconds since the supervisor's start, plus
    /// one; 0 while it waits for faults. Relaxed: a hint.
    busy_since: AtomicU64,
}

impl Post {
    fn new(cpu: usize) -> io::Result<Post> {
        Ok(Post {
            cpu,
            epoll: Epoll::new()?,
            duty: AtomicU32::new(0),
            busy_since: AtomicU64::new(0),
        })
    }

    /// Notes what a thread does, unless it was relieved.
    fn note(&self, thread: u32, busy_since: u64) {
        if self.duty.load(Ordering::Relaxed) == thread {
            self.busy_since.store(busy_since, Ordering::Relaxed);
        }
    }

    /// Whether the thread on duty has been busy for too long at a time.
    fn needs_relief(&self, now: u64) -> bool {
        let since = self.busy_since.load(Ordering::Relaxed);
        since != 0 && now.saturating_sub(since - 1) > RELIEVED_AFTER
    }
}

impl Handlers {
    /// The group's handlers. To stop them, set `stopping` of the group and drop the other end of
    /// `stop`.
    pub fn new(group: Arc<Group>, ports: Arc<Ports>, stop: PipeReader) -> io::Result<Handlers> {
        let cpus = thread::allowed_cpus().into_iter();
        let posts: Vec<Post> = cpus.map(Post::new).collect::<io::Result<_>>()?;
        for post in &posts {
            post.epoll.add(stop.as_fd(), STOP)?;
        }
        Ok(Handlers {
            reader: Reader::new(group.clone(), ports),
            group,
            posts,
            relieved: AtomicU32::new(0),
            _stop: stop,
        })
    }

    /// Starts the threads.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        (0..self.posts.len()).try_for_each(|number| self.start_thread(number, 0))
    }

    fn start_thread(self: &Arc<Self>, number: usize, thread: u32) -> io::Result<()> {
        let handlers = self.clone();
        std::thread::Builder::new()
            .name(format!("fault-{}", self.posts[number].cpu))
            .spawn(move || handlers.run(number, thread))?;
        Ok(())
    }

    /// Relieves the handlers that have been busy for too long. Called by the governor, which
    /// reminds the epolls of what a relieved thread leaves.
    pub fn relieve(self: &Arc<Self>) {
        let now = self.group.resources.milliseconds();
        for (number, post) in self.posts.iter().enumerate() {
            let may_relieve = self.relieved.load(Ordering::Relaxed) < MOST_RELIEVED;
            if !post.needs_relief(now) || !may_relieve {
                continue;
            }
            let thread = post.duty.load(Ordering::Relaxed) + 1;
            // Without a thread more, this one stays on duty, and a later tick tries again.
            if self.start_thread(number, thread).is_ok() {
                self.relieved.fetch_add(1, Ordering::Relaxed);
                post.duty.store(thread, Ordering::Relaxed);
                post.busy_since.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Listens to an address space, first on the CPU on which its main thread ran last. A failure is logged once; the
    /// governor retries if the address space belongs to the group.
    pub fn listen(&self, space: &AddressSpace) -> io::Result<()> {
        let cpu = space
            .attached()
            .and_then(|attached| attached.inspector.last_cpu(attached.inspector.pid() as u32));
        let number = cpu.and_then(|cpu| self.number_of(cpu)).unwrap_or(0);
        let mut armed = lock(&space.listeners);
        if armed.listening.is_empty() {
            let descriptor = space.uffd().as_fd();
            if let Err(error) = self.posts[number].epoll.add_arrivals(descriptor, space.id) {
                space.unlistened.store(true, Ordering::Relaxed);
                if !space.warned_unlistened.swap(true, Ordering::Relaxed) {
                    log::warn!("a program's faults cannot be listened to yet, it waits: {error}");
                }
                return Err(error);
            }
            armed.listening.push((number, 0));
        }
        Ok(())
    }

    /// Re-arms the edge-triggered epoll, so that unread messages are reported again. A fork event that
    /// cannot be read (EMFILE) stays unread, and the kernel does not report when a read of several
    /// messages stopped there.
    pub fn remind(&self, space: &AddressSpace) {
        for (number, _) in &lock(&space.listeners).listening {
            // Fails only if the address space is gone.
            let _ = self.posts[*number]
                .epoll
                .remind(space.uffd().as_fd(), space.id);
        }
    }

    /// Stops listening to a program whose helper was stopped inside the gate, until the governor's next
    /// [`Handlers::listen`], so that the other programs on this CPU do not wait for it.
    fn set_aside(&self, space: &AddressSpace) {
        self.forget(space);
        space.unlistened.store(true, Ordering::Relaxed);
    }

    /// Stops listening.
    pub fn forget(&self, space: &AddressSpace) {
        for (number, _) in lock(&space.listeners).listening.drain(..) {
            // Fails only if it is not registered.
            let _ = self.posts[number].epoll.remove(space.uffd().as_fd());
        }
    }

    fn number_of(&self, cpu: usize) -> Option<usize> {
        self.posts.iter().position(|post| post.cpu == cpu)
    }

    /// Serves a CPU's faults until the group stops, or this thread is relieved.
    fn run(&self, number: usize, thread: u32) {
        let post = &self.posts[number];
        // Failure costs latency only.
        let _ = thread::pin_to(post.cpu);
        thread::set_nice(-10);
        thread::set_timer_slack(1000);
        let mut server = Server::new(self.group.clone());
        let mut ready = Vec::new();
        // A thread is started before it is put on duty.
        while post.duty.load(Ordering::Relaxed) <= thread {
            if self.group.stopping.load(Ordering::Relaxed) {
                return;
            }
            if post.epoll.wait(&mut ready, None).is_err() {
                crate::time::sleep(Duration::from_millis(1));
            }
            post.note(thread, self.group.resources.milliseconds() + 1);
            for token in &ready {
                let Some(space) = self.group.space(*token) else {
                    continue;
                };
                let mut listener = NumberedHandler {
                    handlers: self,
                    number,
                };
                serve_space(&space, &mut server, &self.reader, &mut listener);
                if post.duty.load(Ordering::Relaxed) > thread {
                    // The governor reminds the epoll of the rest.
                    break;
                }
            }
            post.note(thread, 0);
        }
        self.relieved.fetch_sub(1, Ordering::Relaxed);
    }

    /// Samples the CPU of a faulting thread, and updates which handlers listen.
    fn sample(&self, number: usize, space: &AddressSpace, thread: u32) {
        let mut armed = lock(&space.listeners);
        if armed.until_sample > 0 {
            armed.until_sample -= 1;
            return;
        }
        let Some(attached) = space.attached() else {
            return;
        };
        let Some(cpu) = attached.inspector.last_cpu(thread) else {
            return;
        };
        let Some(home) = self.number_of(cpu) else {
            return;
        };
        let descriptor = space.uffd().as_fd();
        let as_expected = home == number;
        armed.distance = if as_expected {
            (armed.distance * 2).clamp(SAMPLE_NEAREST, SAMPLE_FARTHEST)
        } else {
            SAMPLE_NEAREST
        };
        armed.until_sample = armed.distance;
        if !armed
            .listening
            .iter()
            .any(|(listener, _)| *listener == home)
            && self.posts[home]
                .epoll
                .add_arrivals(descriptor, space.id)
                .is_ok()
        {
            armed.listening.push((home, 0));
        }
        for (listener, misses) in &mut armed.listening {
            *misses = if *listener == home { 0 } else { *misses + 1 };
        }
        // Misses are consecutive, so the handler of the last hit never leaves.
        let somebody_hits = armed.listening.iter().any(|(_, misses)| *misses == 0);
        if armed.listening.len() > 1 && somebody_hits {
            armed.listening.retain(|(listener, misses)| {
                let stays = *misses < MISSES_TO_LEAVE;
                if !stays {
                    // Fails only if it is not registered.
                    let _ = self.posts[*listener].epoll.remove(descriptor);
                }
                stays
            });
        }
    }
}

/// One of the handler threads.
struct NumberedHandler<'a> {
    handlers: &'a Handlers,
    number: usize,
}

impl Listener for NumberedHandler<'_> {
    fn listen(&mut self, child: &AddressSpace) {
        // On failure the governor retries.
        let _ = self.handlers.listen(child);
    }

    fn set_aside(&mut self, space: &AddressSpace) {
        self.handlers.set_aside(space);
    }

    fn note_fault(&mut self, space: &AddressSpace, thread: u32) {
        self.handlers.sample(self.number, space, thread);
    }
}
