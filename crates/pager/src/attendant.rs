//! The attendant: lets helpers in, and notices when their programs are gone.

use crate::address_space::{AddressSpace, Arena, Attached};
use crate::group::{Group, lock};
use crate::handler::Handlers;
use crate::page::{PageRange, VirtualPage};
use crate::sentinel::Sentinel;
use crate::shortage;
use memfold_sys::epoll::Epoll;
use memfold_sys::hello::{Hello, MAGIC, Welcome};
use memfold_sys::process::{self, Inspector};
use memfold_sys::thread::set_nice_of;
use memfold_sys::uffd::{self, Uffd};
use memfold_sys::{PAGE_SIZE, socket};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Tokens of the listeners; those of address spaces count from 1 and never come near.
const LISTENERS: [u64; 2] = [0, u64::MAX];
/// Token of the first who connects; those of later ones count on.
const FIRST_NEWCOMER: u64 = 1 << 63;

/// As many as are needed to attach a program, and more.
const DESCRIPTORS_TO_ATTACH: usize = 16;

/// What is asked of the program's userfaultfd.
pub const FEATURES: u64 = uffd::FEATURE_WRITE_PROTECT
    | uffd::FEATURE_EVENT_FORK
    | uffd::FEATURE_EVENT_REMAP
    | uffd::FEATURE_EVENT_REMOVE
    | uffd::FEATURE_EVENT_UNMAP
    | uffd::FEATURE_THREAD_ID;

/// The attendant's thread.
pub struct Attendant {
    group: Arc<Group>,
    handlers: Arc<Handlers>,
    sentinel: Arc<Sentinel>,
    listeners: [OwnedFd; 2],
    epoll: Epoll,
    sockets: HashMap<u64, OwnedFd>,
    /// Those who connected and have not said hello yet, by their tokens.
    newcomers: HashMap<u64, OwnedFd>,
    next_newcomer: u64,
    /// The last who knocked could not be let in.
    keeps_out: bool,
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

impl Attendant {
    pub fn new(
        group: Arc<Group>,
        handlers: Arc<Handlers>,
        sentinel: Arc<Sentinel>,
        listeners: [OwnedFd; 2],
    ) -> io::Result<Attendant> {
        let epoll = Epoll::new()?;
        for (listener, token) in listeners.iter().zip(LISTENERS) {
            epoll.add(listener.as_fd(), token)?;
        }
        Ok(Attendant {
            group,
            handlers,
            sentinel,
            listeners,
            epoll,
            sockets: HashMap::new(),
            newcomers: HashMap::new(),
            next_newcomer: FIRST_NEWCOMER,
            keeps_out: false,
        })
    }

    /// Runs until the group stops.
    pub fn run(&mut self) {
        let mut ready = Vec::new();
        while !self.group.stopping.load(Ordering::Relaxed) {
            if self
                .epoll
                .wait(&mut ready, Some(Duration::from_millis(500)))
                .is_err()
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            for token in &ready {
                match LISTENERS.iter().position(|listener| listener == token) {
                    Some(listener) => self.let_in(listener),
                    None if *token >= FIRST_NEWCOMER => self.hear(*token),
                    None => self.see_off(*token),
                }
            }
        }
    }

    fn let_in(&mut self, listener: usize) {
        loop {
            match socket::accept(self.listeners[listener].as_fd()) {
                Ok(Some(connection)) => {
                    if let Err(error) = self.expect(connection) {
                        log::warn!("a program runs unmanaged: {error}");
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    self.keep_out(&error);
                    return;
                }
            }
        }
    }

    /// Whoever connects may be stopped before it says hello: nobody waits for it.
    fn expect(&mut self, connection: OwnedFd) -> io::Result<()> {
        let token = self.next_newcomer;
        self.next_newcomer += 1;
        self.epoll.add(connection.as_fd(), token)?;
        self.newcomers.insert(token, connection);
        Ok(())
    }

    /// One cannot be let in now, and knocks on.
    fn keep_out(&mut self, why: &io::Error) {
        if !std::mem::replace(&mut self.keeps_out, true) {
            log::warn!("programs cannot be let in ({why}); they wait");
        }
        std::thread::sleep(shortage::PAUSE);
    }

    /// One who connected says hello, or is gone.
    fn hear(&mut self, token: u64) {
        // What a hello brings is lost where there is no room for it.
        let room: io::Result<Vec<OwnedFd>> = (0..DESCRIPTORS_TO_ATTACH)
            .map(|_| self.listeners[0].try_clone())
            .collect();
        if let Err(error) = room {
            self.keep_out(&error);
            return;
        }
        let Some(connection) = self.newcomers.remove(&token) else {
            return;
        };
        // Fails only if it is not there.
        let _ = self.epoll.remove(connection.as_fd());
        match self.attach(connection) {
            Ok(()) => self.keeps_out = false,
            Err(error) => log::warn!("a program runs unmanaged: {error}"),
        }
    }

    fn attach(&mut self, connection: OwnedFd) -> io::Result<()> {
        let peer = socket::peer(connection.as_fd())?;
        let is_ours = || process::descends_from(peer.pid, process::own_id());
        if peer.uid != process::own_user() && !is_ours() {
            return Err(invalid(
                "it is another user's and was not started by this memfold",
            ));
        }
        socket::set_timeout(connection.as_fd(), 2)?;
        let (hello, mut descriptors) = socket::receive_hello(connection.as_fd())?;
        if hello.refused != 0 {
            let why = io::Error::from_raw_os_error(hello.refused as i32);
            if why.kind() == io::ErrorKind::PermissionDenied
                && is_ours()
                && let Ok(device) = uffd::open_device()
            {
                return self.lend(connection, &device);
            }
            return Err(io::Error::other(format!(
                "it may not use userfaultfd ({why})"
            )));
        }
        let (Some(trash), Some(own), 0) = (descriptors.pop(), descriptors.pop(), descriptors.len())
        else {
            return Err(invalid("its helper sent no descriptors"));
        };
        let arena = arena_of(&hello)?;
        prepare_trash(&hello, &trash)?;
        // The helper lives as long as the program; the main thread may not.
        let thread = process::thread_by_own_number(peer.pid, hello.thread).unwrap_or(peer.pid);
        let inspector = Inspector::open(peer.pid, thread)?;
        // What it does is short and makes room: it must not queue behind who needs the room.
        set_nice_of(thread, -10);
        let inherited = self.group.space(hello.inherited);
        if hello.inherited != 0 && inherited.is_none() {
            return Err(invalid("it names an address space that is not there"));
        }
        let is_child = inherited.is_some();
        let space = match inherited {
            Some(space) => space,
            None => self.newcomer(own, hello.relative)?,
        };
        space.open_stage(arena.stage)?;
        let resident = inspector.sizes().map_or(0, |sizes| sizes.resident_pages);
        let file = lock(&space.mover)
            .take_file()
            .ok_or_else(|| invalid("it has a helper"))?;
        if !space.attach(Attached { inspector, arena }) {
            return Err(invalid("it has a helper"));
        }
        space.helper.store(hello.thread as u32, Ordering::Relaxed);
        space.set_resident_pages(resident);
        if is_child {
            // It stands still until it is welcomed, so its mappings are those of the fork.
            space.meet(None);
        } else {
            self.handlers.listen(&space)?;
            self.group.add_space(space.clone());
            if space.forked.load(Ordering::Relaxed) {
                self.group.shared.came(resident);
            }
        }
        let welcome = Welcome {
            magic: MAGIC,
            address_space: space.id,
            replaces_uffd: u64::from(is_child),
        };
        let uffd = space.uffd_descriptor().as_fd();
        let both = [file.as_fd(), uffd];
        let sent = if is_child { &both[..] } else { &both[..1] };
        self.epoll.add(connection.as_fd(), space.id)?;
        socket::send_welcome(connection.as_fd(), &welcome, sent)?;
        space.detached.store(false, Ordering::Relaxed);
        self.sockets.insert(space.id, connection);
        Ok(())
    }

    /// A program that was started here and is another user's by now may do what this memfold may; it
    /// says hello again.
    fn lend(&mut self, connection: OwnedFd, device: &OwnedFd) -> io::Result<()> {
        let welcome = Welcome {
            magic: MAGIC,
            ..Welcome::default()
        };
        socket::send_welcome(connection.as_fd(), &welcome, &[device.as_fd()])?;
        self.expect(connection)
    }

    /// An address space that inherits nothing by way of the supervisor. It may share pages all the
    /// same, with the one that forked it when nothing there was managed.
    fn newcomer(&self, uffd: OwnedFd, relative: u64) -> io::Result<Arc<AddressSpace>> {
        Uffd(uffd.as_raw_fd()).api(FEATURES)?;
        let mover = self.sentinel.mover()?;
        let (group, id) = (self.group.clone(), self.group.next_id());
        let space = AddressSpace::new(group, id, uffd, mover);
        let Some(relative) = self.group.space(relative) else {
            return Ok(Arc::new(space));
        };
        let space = Arc::new(space.of_child(relative.family.clone(), None));
        relative.forked.store(true, Ordering::Relaxed);
        space.family.join(&relative);
        space.family.join(&space);
        Ok(space)
    }

    /// A helper's socket closed: its thread ended, and with it the address space, or soon. It is
    /// kept until the kernel says that it is gone, as another process may still be in it.
    fn see_off(&mut self, id: u64) {
        if let Some(connection) = self.sockets.remove(&id) {
            // Fails only if it is not there.
            let _ = self.epoll.remove(connection.as_fd());
        }
        if let Some(space) = self.group.space(id) {
            space.detached.store(true, Ordering::Relaxed);
            space.leave();
        }
    }
}

fn arena_of(hello: &Hello) -> io::Result<Arena> {
    let whole = PageRange::of_addresses(hello.arena, hello.arena + hello.arena_length);
    let stage_end = hello.stage + hello.stage_pages * PAGE_SIZE as u64;
    let stage = PageRange::of_addresses(hello.stage, stage_end);
    if stage.intersection(whole) != stage || stage.is_empty() {
        return Err(invalid("its stage is not in its arena"));
    }
    Ok(Arena {
        whole,
        stage,
        beacon: VirtualPage::containing(hello.beacon),
    })
}

/// Dropped pages pass through the trash, which asks for no events.
fn prepare_trash(hello: &Hello, trash: &OwnedFd) -> io::Result<()> {
    let trash_uffd = Uffd(trash.as_raw_fd());
    // Nobody reads its messages: whoever touches the trash (mlockall does) must not wait for ever.
    trash_uffd.api(uffd::FEATURE_SIGBUS)?;
    let stage_end = hello.stage + hello.stage_pages * PAGE_SIZE as u64;
    let arena_end = hello.arena + hello.arena_length;
    // The trash lies between the stage and the last guard page.
    let length = arena_end - PAGE_SIZE as u64 - stage_end;
    trash_uffd.register(hello.trash, length)?;
    Ok(())
}
