//! What must be true before an address space is served, whatever its hello says.
//!
//! A hello comes from a process that descends from this one, which may be another user's by now, or
//! taken over. It names addresses and sends userfaultfds, and memfold will read memory, register ranges and
//! put pages by them. So before any of that it is checked that
//!
//! * the numbers can be those of an arena (`Hello::layout`), and the helper is a thread of the peer;
//! * the userfaultfd and the files of `/proc` by which the peer is inspected are of *one* address space. A
//!   page of random bytes is put behind the places of the stage through the userfaultfd, where it stays,
//!   and must be read through the opened memory. The page map and the mappings, which were opened before,
//!   must show it, and the stage as a mapping of its own. (A peer that executes a program with more rights between two of
//!   these looks has an address space in which no userfaultfd of the peer's can put anything.)
//! * the helper is not the main thread. All files of `/proc` are opened by way of it, so they are of one address
//!   space: executing a program ends every other thread.
//! * a peer that claims the inheritance of a forked child is the process that was seen with the secret of that child's
//!   beacon, or shows it if none was. Then the same proof is made by the userfaultfd that the kernel made for the child.
//!
//! Memory of another process cannot pass: a process that fills its own with the expected bytes has shown its own.

use crate::page::{PageRange, VirtualPage};
use crate::supervised::fork::expected_children::Admission;
use crate::supervised::helper::accept::{Acceptor, Arrived};
use crate::supervised::helper::discard::{Connection, Sent};
use crate::supervised::helper::peer::Peer;
use crate::supervised::helper::takeover::PROOF_PAGES;
use crate::supervised::kernel::Memory;
use crate::supervised::kernel::linux::{FEATURES, FEATURES_THAT_TRACK, FEATURES_WITHOUT_FORKS};
use crate::supervised::reclaim::batch::HelperPort;
use crate::supervised::space::fork_state::ForkState;
use crate::supervised::space::{AddressSpace, Arena, Attached};
use crate::sync::lock;
use memfold_sys::PAGE_SIZE;
use memfold_sys::hello::{Hello, Layout, MAGIC, TOKEN, Welcome};
use memfold_sys::owned_uffd::borrow;
use memfold_sys::privilege;
use memfold_sys::process::{self, Inspector};
use memfold_sys::thread::{make_ordinary, set_nice_of};
use memfold_sys::uffd;
use memfold_sys::{Errno, socket};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// So many random bytes fill the page by which a userfaultfd is proven, again and again.
const PROOF_BYTES: usize = 64;

/// How long that page is waited for. An anonymous page takes microseconds; longer lets a peer that maps a
/// file there delay the admission of others.
const PROOF_PATIENCE: Duration = Duration::from_millis(200);

/// How often a page is tried to be put where mappings change.
const TRIES: u32 = 50;

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// The arena that a hello tells of; the last page of what it calls the stage is that of the proof.
fn arena_of(layout: &Layout) -> Arena {
    let range = |(start, end)| PageRange::of_addresses(start, end);
    let (stage, stage_end) = layout.stage;
    Arena {
        whole: range(layout.arena),
        stage: range((stage, stage_end - PROOF_PAGES * PAGE_SIZE as u64)),
        beacon: VirtualPage::containing(layout.beacon),
    }
}

/// Where a peer's helper has its memory, and which thread of the peer's it is.
fn helper_of(peer: &Peer, hello: &Hello) -> io::Result<(Layout, i32)> {
    let layout = hello
        .layout()
        .ok_or_else(|| invalid("its helper named addresses that cannot be"))?;
    let thread = peer
        .process
        .thread_by_own_number(hello.thread)
        .ok_or_else(|| invalid("its helper is none of its threads"))?;
    if thread == peer.process.pid() {
        return Err(invalid("its helper is its main thread"));
    }
    Ok((layout, thread))
}

impl Acceptor {
    /// Admits a program. Returns its number, and the connection by which its end is noticed, which is watched from now on.
    pub(crate) fn admit(
        &mut self,
        peer: Peer,
        user: u32,
        hello: &Hello,
        [own, trash]: [Sent; 2],
    ) -> io::Result<(u64, Connection)> {
        let helper = helper_of(&peer, hello)?;
        let (layout, thread) = &helper;
        let is_child = hello.inherited != 0;
        let (space, inspector) = if is_child {
            let beacon = arena_of(layout).beacon;
            self.claimed(hello.inherited, &peer, *thread, beacon)?
        } else {
            let prepares_forks = self.group.resources.prepares_forks();
            let inspector = peer.inspect(*thread, None, prepares_forks)?;
            let space = self.newcomer(own, &peer, user, hello.relative)?;
            (space, inspector)
        };
        let admitted = self.admit_as(&space, inspector, (&peer, user), (hello, helper), &trash);
        if admitted.is_err() {
            self.unwatch(&peer.connection);
            if !is_child {
                self.undo(space.clone(), user);
            }
        }
        admitted.map(|()| (space.id, peer.connection))
    }

    /// The child of a prepared fork is admitted once it has its parent's page states. Its token is known to its parent
    /// and to it, and good for one hello; like any peer it has yet to prove that the userfaultfd is its own.
    pub(crate) fn await_page_states(&mut self, child: Arrived, own: Sent) -> io::Result<()> {
        helper_of(&child.peer, &child.hello)?;
        borrow(&own).api(self.features(FEATURES_WITHOUT_FORKS))?;
        // Up to here others were seen to, for which its parent is not to account.
        self.note_busy();
        let expected = &self.group.expected_children;
        if let Err(unused) = expected.arrive(child.hello.inherited, own.keep().into()) {
            self.discard.drop_later(child.user, Box::new(unused));
            return Err(invalid("its parent did not fork, or too long ago"));
        }
        self.arrived.push(child);
        Ok(())
    }

    /// Admits those that have their page states by now.
    pub(crate) fn admit_arrived(&mut self) {
        let mut next = 0;
        while let Some(child) = self.arrived.get(next) {
            let expected = &self.group.expected_children;
            let admission = expected.admission(child.hello.inherited, child.at.elapsed());
            if matches!(admission, Admission::NotYet) {
                next += 1;
                continue;
            }
            let child = self.arrived.swap_remove(next);
            let process = child.peer.process.clone();
            let admitted = match admission {
                Admission::Forked(space) => self.admit_forked(space, child),
                Admission::Never(unused) => {
                    if let Some(unused) = unused {
                        self.discard.drop_later(child.user, Box::new(unused));
                    }
                    Err(invalid(
                        "its parent's page states could not be copied in time",
                    ))
                }
                Admission::NotYet => return,
            };
            self.keep_or_warn(&process, admitted);
        }
    }

    fn admit_forked(
        &self,
        space: Arc<AddressSpace>,
        child: Arrived,
    ) -> io::Result<(u64, Connection)> {
        let (peer, hello) = (child.peer, &child.hello);
        let admitted = helper_of(&peer, hello).and_then(|helper| {
            let inspector = peer.inspect(helper.1, Some(&space), true)?;
            let peer = (&peer, child.user);
            self.admit_as(&space, inspector, peer, (hello, helper), &child.trash)
        });
        let id = space.id;
        if admitted.is_err() {
            self.unwatch(&peer.connection);
            self.undo(space, child.user);
        }
        admitted.map(|()| (id, peer.connection))
    }

    /// Lets go of an address space that was for one process alone, and could not be admitted.
    fn undo(&self, space: Arc<AddressSpace>, user: u32) {
        // It counts as a program if `take_in` was done, or its fork prepared.
        if self.group.space(space.id).is_some() {
            self.handlers.forget(&space);
            self.group.dismiss(&space);
        }
        // Its userfaultfd goes with it.
        self.discard.drop_later(user, Box::new(space));
    }

    /// Has a peer prove that an address space is its own.
    fn admit_as(
        &self,
        space: &Arc<AddressSpace>,
        inspector: Inspector,
        (peer, user): (&Peer, u32),
        (hello, (layout, thread)): (&Hello, (Layout, i32)),
        trash: &Sent,
    ) -> io::Result<()> {
        prove(space, &inspector, &layout, trash)?;
        space.helper.store(hello.thread as u32, Ordering::Relaxed);
        // What was proved took time: the number of a thread that has ended may be another process's by now.
        if peer.process.state(thread).is_some() {
            // Beside a busy real-time thread that made it, on a CPU of its own, it would get no time.
            make_ordinary(thread);
            if user == process::own_user() {
                // Its commands are short and make room: it must not queue behind threads that wait for room.
                set_nice_of(thread, -10);
            }
        }
        self.attach_helper(space, inspector, arena_of(&layout), peer, hello)
    }

    /// The peer has proved its identity: its address space is served, and the helper welcomed.
    fn attach_helper(
        &self,
        space: &Arc<AddressSpace>,
        inspector: Inspector,
        arena: Arena,
        peer: &Peer,
        hello: &Hello,
    ) -> io::Result<()> {
        let is_child = hello.inherited != 0;
        let is_prepared = hello.inherited & TOKEN != 0;
        let resident = inspector.sizes().map_or(0, |sizes| sizes.resident_pages);
        let file = lock(&space.helper_port)
            .take_file()
            .ok_or_else(|| invalid("it has a helper"))?;
        let attached = Attached {
            inspector: Arc::new(inspector),
            arena,
            to_follow: OnceLock::new(),
        };
        if !space.attach(attached) {
            return Err(invalid("it has a helper"));
        }
        space.set_resident_pages(resident);
        if self.group.resources.prepares_forks() {
            if hello.can_prepare == 0 {
                return Err(invalid(
                    "its forks cannot be followed: without CAP_SYS_PTRACE that needs syscall user dispatch (Linux \
                     5.11), which the kernel lacks or a seccomp filter refuses",
                ));
            }
            space.prepare_forks(arena.beacon)?;
        }
        self.take_in(space, is_child, resident)?;
        if is_prepared && !space.list_adopted() {
            return Err(invalid(
                "it has too many mappings to be followed after a fork",
            ));
        }
        // Its end must be noticed once it is managed.
        self.watch(&peer.connection, space.id)?;
        welcome(&peer.connection, space, &file, is_child && !is_prepared)?;
        space.life.attach();
        Ok(())
    }

    /// From here on its faults are served.
    fn take_in(&self, space: &Arc<AddressSpace>, is_child: bool, resident: u64) -> io::Result<()> {
        if is_child {
            // It stands still until it is welcomed, so its mappings are those of the fork.
            space.identify_child(&self.group, None);
            return Ok(());
        }
        self.handlers.listen(space)?;
        // Before a count may include it.
        if space.fork.forked.load(Ordering::Relaxed) {
            self.group.resources.shared.add_space(resident);
        }
        self.leave_earlier(space);
        self.group.add_space(space.clone());
        Ok(())
    }

    /// What a process had before it executed a program is not its own any more, though another one may use it still.
    fn leave_earlier(&self, space: &AddressSpace) {
        let Some(inspector) = space.inspector() else {
            return;
        };
        let process = inspector.process();
        for earlier in self.group.spaces() {
            let of = earlier.inspector().filter(|_| earlier.is_detached());
            if of.is_some_and(|of| of.process().is_same(process)) {
                earlier.leave();
            }
        }
    }

    /// The address space of a forked child that says it is its own, and the way to look into it.
    ///
    /// A child can read what its beacon holds, and show it to others. So this only selects the peers that may go
    /// on to prove that the userfaultfd which the kernel made for that child is its own. The process that was seen with it
    /// needs not show it again, unless it has executed a program since.
    fn claimed(
        &self,
        id: u64,
        peer: &Peer,
        thread: i32,
        beacon: VirtualPage,
    ) -> io::Result<(Arc<AddressSpace>, Inspector)> {
        let refused = || invalid("it claims memory that is not to be claimed");
        let space = self.group.space(id);
        let space = space.filter(|space| space.is_id_request(beacon));
        let space = space.ok_or_else(refused)?;
        let seen = space.inspector();
        let is_peer = |seen: &Arc<Inspector>| seen.process().is_same(&peer.process);
        if !seen.as_ref().is_none_or(is_peer) {
            return Err(refused());
        }
        let prepares_forks = self.group.resources.prepares_forks();
        let inspector = peer.inspect(thread, Some(&space), prepares_forks)?;
        if seen.is_some() && process::is_fork(peer.process.pid()) {
            return Ok((space, inspector));
        }
        // It was asked for already, or not.
        let shown = space.beacon_page();
        match put(&space, beacon.address(), &shown) {
            Ok(()) => {}
            Err(errno) if errno == Errno::EEXIST => {}
            Err(errno) => return Err(errno.into()),
        }
        if space.is_shown_by(&inspector, beacon) {
            Ok((space, inspector))
        } else {
            Err(invalid("it claims memory of another process"))
        }
    }

    /// What is asked for of a userfaultfd: these features, and what tracking accesses takes.
    fn features(&self, features: u64) -> u64 {
        if self.group.resources.tracks_accesses() {
            features | FEATURES_THAT_TRACK
        } else {
            features
        }
    }

    /// An address space that inherits nothing by way of the supervisor. It may share pages all the
    /// same, with the one that forked it when nothing there was managed.
    fn newcomer(
        &self,
        uffd: Sent,
        peer: &Peer,
        user: u32,
        relative: u64,
    ) -> io::Result<Arc<AddressSpace>> {
        if self.group.resources.prepares_forks() {
            borrow(&uffd).api(self.features(FEATURES_WITHOUT_FORKS))?;
        } else {
            // The kernel reports forks to a process with CAP_SYS_PTRACE only.
            let _raised = privilege::raised();
            borrow(&uffd).api(self.features(FEATURES))?;
        }
        let (port, file) = self.ports.new_port()?;
        let port = HelperPort::new(port, file);
        let relative = self.group.space(relative);
        let relative = relative.filter(|relative| is_relative(relative, peer, user));
        let fork = relative
            .as_ref()
            .map_or_else(ForkState::default, |relative| {
                let ancestors = relative.ancestors_of_child(|id| self.group.space(id).is_some());
                ForkState::of_child(relative.fork.family.clone(), ancestors, None)
            });
        let (resources, id) = (self.group.resources.clone(), self.group.next_id());
        let space = Arc::new(AddressSpace::new(
            resources,
            id,
            (uffd.keep().into(), port),
            fork,
        ));
        let Some(relative) = relative else {
            return Ok(space);
        };
        relative.fork.forked.store(true, Ordering::Relaxed);
        relative.fork.sharing.note_fork();
        space.fork.family.join(&relative);
        space.fork.family.join(&space);
        Ok(space)
    }
}

/// Whether a program may share pages with one that it says forked it: that is its parent, or of its user.
fn is_relative(relative: &AddressSpace, peer: &Peer, user: u32) -> bool {
    let Some(inspector) = relative.inspector() else {
        return false;
    };
    let process = inspector.process();
    let is_parent = || {
        let parent = peer.process.parent();
        parent == Some(process.pid()) && process.signal(0).is_ok()
    };
    is_parent() || process.owner().ok() == Some(user)
}

/// Shows that peer, userfaultfd and files are of one address space, and prepares its trash.
fn prove(
    space: &AddressSpace,
    inspector: &Inspector,
    layout: &Layout,
    trash: &Sent,
) -> io::Result<()> {
    let stage = arena_of(layout).stage;
    space.open_stage(stage)?;
    if !proves_itself(space, inspector, stage)? {
        return Err(invalid("its userfaultfd is of another process"));
    }
    space.leave_stage(stage)?;
    prepare_trash(layout, trash)
}

/// Whether the userfaultfd, by which the stage was registered, and the files of the inspector are of one
/// address space; see the module.
fn proves_itself(
    space: &AddressSpace,
    inspector: &Inspector,
    stage: PageRange,
) -> io::Result<bool> {
    let (start, place) = (stage.start.address(), stage.end.address());
    let end = place + PROOF_PAGES * PAGE_SIZE as u64;
    let mut secret = [0u8; PROOF_BYTES];
    getrandom::fill(&mut secret)?;
    let mut proof = [0u8; PAGE_SIZE];
    for part in proof.chunks_exact_mut(PROOF_BYTES) {
        part.copy_from_slice(&secret);
    }
    put(space, place, &proof)?;
    // The peer has proved nothing yet, so the read must not wait for what it maps there.
    let found = inspector
        .read_page_within(place, PROOF_PATIENCE)
        .ok_or_else(|| invalid("the page that proves its userfaultfd could not be read in time"))?;
    let is_present = inspector.present(start, end)? == [(place, end)];
    Ok(*found == proof && is_present && inspector.has_mapping(start, end)?)
}

/// Puts a page where there is none, also while mappings change for a moment.
fn put(space: &AddressSpace, address: u64, page: &[u8; PAGE_SIZE]) -> Result<(), Errno> {
    let mut tries = 0;
    loop {
        match space
            .uffd()
            .put_page(VirtualPage::containing(address), page)
        {
            Err(partial) if partial.errno == Errno::EAGAIN && tries < TRIES => {
                tries += 1;
                crate::time::sleep(Duration::from_millis(1));
            }
            put => return put.map_err(|partial| partial.errno),
        }
    }
}

/// Pages to be freed pass through the trash, which asks for no events.
fn prepare_trash(layout: &Layout, trash: &Sent) -> io::Result<()> {
    let trash_uffd = borrow(trash);
    // No thread reads its messages: a thread that touches the trash (by mlockall) must not wait for ever.
    trash_uffd.api(uffd::FEATURE_SIGBUS)?;
    trash_uffd.register(layout.trash.0, layout.trash.1 - layout.trash.0)?;
    Ok(())
}

fn welcome(
    connection: &Connection,
    space: &AddressSpace,
    channel: &OwnedFd,
    is_child: bool,
) -> io::Result<()> {
    let welcome = Welcome {
        magic: MAGIC,
        address_space: space.id,
        replaces_uffd: u64::from(is_child),
    };
    let both = [channel.as_fd(), space.uffd().as_fd()];
    let sent = if is_child { &both[..] } else { &both[..1] };
    socket::send_welcome(connection.as_fd(), &welcome, sent)
}
