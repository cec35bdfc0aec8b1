//! The helper thread: set-up, then the supervisor's commands until either side is gone.

use crate::message::{connect, receive, send};
use crate::rendezvous::{carries, rendezvous};
use crate::state::{
    ADDRESS_SPACE, Handover, IS_BROUGHT, MANAGED, READY, REFUSED, STRANDED, UNANNOUNCED, drop_note,
    let_go, set_channel,
};
use crate::system::die;
use crate::{carry, dispatch, system};
use core::sync::atomic::Ordering;
use memfold_sys::channel::{CHANNEL_BYTES, Channel, Command, DropRun, MoveRun, RELEASED, RUNS_MAX};
use memfold_sys::futex::{self, OWNER_DIED};
use memfold_sys::gate::{Abandoned, NAP_NS};
use memfold_sys::hello::{Hello, MAGIC, STAGE_PAGES, TOKEN, TRASH_PAGES, Welcome};
use memfold_sys::uffd::Uffd;
use memfold_sys::{Errno, PAGE_SIZE, raw};

/// The channel, and the userfaultfd that the kernel made for a forked child.
const DESCRIPTORS_OF_WELCOME: usize = 2;

const CLONE_VM: usize = 0x100;
const CLONE_SIGHAND: usize = 0x800;
const CLONE_THREAD: usize = 0x1_0000;
const CLONE_SYSVSEM: usize = 0x4_0000;

/// Starts the helper on its own stack. Without `CLONE_FILES`, so that its descriptor table is a
/// copy; without `CLONE_FS`, as a program that shares its root and working directory with another
/// thread may not enter a mount namespace; without TLS, which it therefore must not use.
///
/// # Safety
/// `stack_top` must be the 16-byte aligned end of an unused stack; `handover` must stay valid
/// until its state is set.
pub unsafe fn spawn(stack_top: usize, handover: *const Handover) -> bool {
    let flags = CLONE_VM | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
    // SAFETY: the caller's promise; `run` uses no thread-local storage.
    unsafe { raw::clone(flags, stack_top, run, handover.cast()) > 0 }
}

/// What a helper works with after its set-up.
struct Helper {
    channel: &'static Channel,
    uffd: Uffd,
    trash_uffd: Uffd,
    stage: usize,
    trash: usize,
}

extern "C" fn run(handover: *const u8) -> ! {
    // SAFETY: `spawn` passes a handover, and its caller keeps that until the state is set, which is
    // the last use.
    let handover = unsafe { &*handover.cast::<Handover>() };
    let introduced = introduce(handover);
    let known = introduced.is_ok();
    let helper = introduced.and_then(|introduced| introduced.settle(handover));
    let state = match (&helper, known) {
        (Ok(_), _) => READY,
        (Err(_), false) => REFUSED,
        (Err(_), true) => STRANDED,
    };
    handover.state.store(state, Ordering::Release);
    futex::wake(&handover.state, 1);
    match helper {
        Ok(helper) => helper.serve(),
        Err(_) => system::exit_thread(0),
    }
}

/// A helper that has sent its hello: the supervisor may rely on it.
struct Introduced {
    socket: i32,
    uffd: Uffd,
    trash_uffd: Uffd,
}

/// Says hello, and before that looks whether the answer could be received.
fn introduce(handover: &Handover) -> Result<Introduced, Errno> {
    system::name_thread(c"memfold");
    system::close_all()?;
    system::leave_working_directory();
    // The kernel made none for the child of a prepared fork.
    let is_made = handover.inherited != 0 && handover.inherited & TOKEN == 0;
    let opened = open_descriptors(is_made);
    match opened {
        // The socket is one more.
        Ok((_, trash)) => system::has_room_for(1 + DESCRIPTORS_OF_WELCOME, trash.0)?,
        // Of no interest to the supervisor, which cannot fix it.
        Err(Errno::EMFILE) => return Err(Errno::EMFILE),
        Err(_) => {}
    }
    let connection = connect(&rendezvous())?;
    let socket = connection.socket;
    let arena = &handover.arena;
    let mut hello = Hello {
        magic: MAGIC,
        inherited: handover.inherited,
        arena: arena.start as u64,
        arena_length: arena.length as u64,
        stage: arena.stage as u64,
        stage_pages: STAGE_PAGES as u64,
        trash: arena.trash as u64,
        beacon: arena.beacon as u64,
        relative: ADDRESS_SPACE.load(Ordering::Relaxed),
        thread: system::own_thread(),
        refused: 0,
        can_prepare: u64::from(dispatch::can_dispatch()),
    };
    let (uffd, trash_uffd) = match opened {
        Ok(pair) => pair,
        Err(errno) => {
            hello.refused = errno.0 as u64;
            send(&connection, &hello, None)?;
            hello.refused = 0;
            let pair = open_by_supervisor(socket)?;
            system::has_room_for(DESCRIPTORS_OF_WELCOME, socket)?;
            pair
        }
    };
    if system::is_locked(arena.trash) {
        // By `mlockall` for what is mapped later: the kernel has filled it.
        let length = (STAGE_PAGES + TRASH_PAGES) * PAGE_SIZE;
        system::unlock(arena.stage, length);
        system::drop_pages(arena.stage, length)?;
    }
    // Where the kernel does not seal (before Linux 6.10), the supervisor does not ask for it.
    let _ = arena.seal(carries());
    // Before any command can set it to work, and while the program waits.
    system::give_up_privileges(rendezvous().inspects_others != 0);
    send(&connection, &hello, Some([uffd.0, trash_uffd.0]))?;
    Ok(Introduced {
        socket,
        uffd,
        trash_uffd,
    })
}

impl Introduced {
    /// Is welcomed.
    fn settle(self, handover: &Handover) -> Result<Helper, Errno> {
        let mut welcome = Welcome::default();
        let [channel_fd, replacement] = receive(self.socket, &mut welcome)?;
        if welcome.magic != MAGIC || channel_fd < 0 {
            return Err(Errno::EINVAL);
        }
        let uffd = match (welcome.replaces_uffd != 0, replacement >= 0) {
            (true, true) => Uffd(replacement),
            (true, false) => return Err(Errno::EINVAL),
            (false, _) => self.uffd,
        };
        let arena = &handover.arena;
        system::map_shared(arena.channel, CHANNEL_BYTES, channel_fd)?;
        system::close(channel_fd);
        system::keep_from_children(arena.channel, CHANNEL_BYTES)?;
        // SAFETY: the mapping is CHANNEL_BYTES of zeroed or initialised shared memory, page aligned,
        // and stays mapped for the life of the process image.
        let channel = unsafe { &*(arena.channel as *const Channel) };
        set_channel(channel);
        ADDRESS_SPACE.store(welcome.address_space, Ordering::Relaxed);
        Ok(Helper {
            channel,
            uffd,
            trash_uffd: self.trash_uffd,
            stage: arena.stage,
            trash: arena.trash,
        })
    }
}

/// The program's userfaultfd and the trash's. A forked child gets the former from the supervisor,
/// which had it from the kernel; it may have given up the right to make one itself.
fn open_descriptors(forked: bool) -> Result<(Uffd, Uffd), Errno> {
    let trash = Uffd::create_for_user_mode()?;
    let own = if forked { Ok(trash) } else { Uffd::create() };
    if own.is_err() {
        system::close(trash.0);
    }
    Ok((own?, trash))
}

/// The same by the device that the supervisor sends to an admitted helper; it hangs up on others.
fn open_by_supervisor(socket: i32) -> Result<(Uffd, Uffd), Errno> {
    let [device, _] = receive(socket, &mut Welcome::default())?;
    let (own, trash) = (Uffd::create_by(device), Uffd::create_by(device));
    system::close(device);
    Ok((own?, trash?))
}

impl Helper {
    fn serve(&self) -> ! {
        let channel = self.channel;
        let mut done = channel.done.load(Ordering::Acquire);
        loop {
            let alive = channel.alive.load(Ordering::Acquire);
            if alive & OWNER_DIED != 0 {
                die(b"memfold: the supervisor is gone; the program is killed, as part of its memory went with it\n");
            }
            match channel.dismissed.load(Ordering::Acquire) {
                0 => {}
                RELEASED if let_go(channel) => {
                    self.drop_stage();
                    // It is sealed, so it stays, as any other memory of the program's: a later memfold may manage it.
                    let length = (STAGE_PAGES + TRASH_PAGES) * PAGE_SIZE;
                    let _ = system::give_to_children(self.stage, length);
                    if IS_BROUGHT.load(Ordering::Relaxed) != 0 {
                        drop_note();
                    }
                    system::exit_thread(0)
                }
                // It is asked again.
                RELEASED => channel.dismissed.store(0, Ordering::Relaxed),
                status => system::end_program(status - 1),
            }
            withhold(channel);
            let posted = channel.posted.load(Ordering::Acquire);
            if posted == done {
                let _ = futex::wait(&channel.alive, alive, None);
                continue;
            }
            channel.seen.store(posted, Ordering::Release);
            MANAGED.store(1, Ordering::Relaxed);
            // SAFETY: between `posted` and `done` the command is the helper's alone.
            self.execute(unsafe { &mut *channel.command() }, posted);
            done = posted;
            futex::wake_all(&channel.done);
        }
    }

    /// Drops what is left in the stage of a program that was let go: the page that proved its userfaultfd. Unregistered
    /// first, as an event would be waited for otherwise.
    fn drop_stage(&self) {
        let length = STAGE_PAGES * PAGE_SIZE;
        let unregistered = self.uffd.unregister(self.stage as u64, length as u64);
        // What cannot be dropped is one page.
        let _ = unregistered.and_then(|()| system::drop_pages(self.stage, length));
    }

    /// Executes a command and notes that it is done, the latter *inside* the gate: an event that
    /// is applied next must find the moves either all to come, and then stale, or all settled.
    fn execute(&self, command: &mut Command, posted: u32) {
        let channel = self.channel;
        let drops = (command.drop_count as usize).min(RUNS_MAX);
        for run in command.drops.iter_mut().take(drops) {
            run.errno = self.drop_run(run).err().map_or(0, |errno| errno.0);
        }
        let moves = (command.move_count as usize).min(RUNS_MAX);
        if moves > 0 && system::is_locked(self.trash) {
            // By `mlockall`. The kernel moves locked pages to locked memory alone, so it moves none to
            // a stage that is not, and locked pages stay where they are.
            system::unlock(self.stage, (STAGE_PAGES + TRASH_PAGES) * PAGE_SIZE);
        }
        for run in command
            .moves
            .iter_mut()
            .take(moves)
            .filter(|run| run.unshare != 0)
        {
            // Outside the gate: a page that is missing after all faults here, and the fault is
            // served by the thread that needs the gate.
            let length = run.pages as usize * PAGE_SIZE;
            let broken = system::break_sharing(run.source as usize, length);
            run.errno = broken.err().map_or(0, |errno| errno.0);
        }
        let gone = || channel.alive.load(Ordering::Relaxed) & OWNER_DIED != 0;
        let moved = if carries() {
            let runs = &mut command.moves[..moves];
            carry::carry_runs(channel, self.uffd, (command.event_count, runs), &gone)
        } else {
            self.move_runs(command, moves, &gone)
        };
        if moved.is_err() {
            // The supervisor is dead: nothing reads the outcome.
            return;
        }
        // Release: the outcome is seen by a thread that sees `done`.
        channel.done.store(posted, Ordering::Release);
        channel.gate.leave();
    }

    /// Moves the runs, unless an event came in between. Stays in the gate.
    fn move_runs(
        &self,
        command: &mut Command,
        moves: usize,
        gone: &impl Fn() -> bool,
    ) -> Result<(), Abandoned> {
        let channel = self.channel;
        channel.gate.enter(NAP_NS, gone)?;
        command.stale =
            u32::from(channel.event_count.load(Ordering::Relaxed) != command.event_count);
        if command.stale == 0 {
            let runs = command.moves.iter_mut().take(moves);
            for run in runs.filter(|run| run.unshare == 0) {
                self.move_run(run);
            }
        }
        Ok(())
    }

    /// The stage is registered with the program's own userfaultfd, so that the kernel refuses the
    /// move (EAGAIN) while an event of the program's is unread.
    fn move_run(&self, run: &mut MoveRun) {
        run.moved = 0;
        run.errno = 0;
        let mut chunk = run.pages;
        while run.moved < run.pages {
            let done = u64::from(run.moved) * PAGE_SIZE as u64;
            let length = u64::from(chunk.min(run.pages - run.moved)) * PAGE_SIZE as u64;
            match self
                .uffd
                .move_pages(run.target + done, run.source + done, length)
            {
                Ok(()) => {
                    run.moved += (length / PAGE_SIZE as u64) as u32;
                    chunk = run.pages;
                }
                // A partial move has no reason; the next try at the rest has.
                Err(partial) if partial.done > 0 => {
                    run.moved += (partial.done / PAGE_SIZE as u64) as u32;
                }
                // The run may cross from one mapping into the next.
                Err(partial) if partial.errno == Errno::EINVAL && length > PAGE_SIZE as u64 => {
                    chunk = (length / PAGE_SIZE as u64 / 2) as u32;
                }
                Err(partial) => {
                    run.errno = partial.errno.0;
                    return;
                }
            }
        }
    }

    /// Dropping a staged page in place would raise an event on the program's userfaultfd and make
    /// every ioctl on it fail meanwhile. The trash is registered with one that asks for none.
    fn drop_run(&self, run: &DropRun) -> Result<(), Errno> {
        if carries() {
            return carry::drop_run(self.uffd, run);
        }
        let mut start = run.start;
        let mut left = u64::from(run.pages);
        while left > 0 {
            let pages = left.min(TRASH_PAGES as u64);
            let length = pages * PAGE_SIZE as u64;
            let moved = self.trash_uffd.move_pages(self.trash as u64, start, length);
            let emptied = system::drop_pages(self.trash, length as usize);
            if moved.is_err() {
                // The program may have asked for merging since.
                system::forbid_merging(start as usize, length as usize);
                self.drop_singly(start, pages)?;
            }
            emptied?;
            start += length;
            left -= pages;
        }
        Ok(())
    }
}

impl Helper {
    /// After a run that stopped somewhere: pages that are gone already are as they should be.
    fn drop_singly(&self, start: u64, pages: u64) -> Result<(), Errno> {
        let mut result = Ok(());
        for index in 0..pages {
            let page = start + index * PAGE_SIZE as u64;
            let moved = self
                .trash_uffd
                .move_pages(self.trash as u64, page, PAGE_SIZE as u64);
            system::drop_pages(self.trash, PAGE_SIZE)?;
            match moved {
                Ok(()) => {}
                Err(partial) if partial.errno == Errno::ENOENT => {}
                Err(partial) => result = Err(partial.errno),
            }
        }
        result
    }
}

/// Keeps a range from forked children, if the supervisor asks for it and no thread forks just now: what such a
/// thread's child must have was decided already.
fn withhold(channel: &Channel) {
    let request = &channel.withhold;
    // SeqCst: see `is_withholding`.
    let asked = request.asked.load(Ordering::SeqCst);
    if asked == request.answered.load(Ordering::Relaxed) {
        return;
    }
    let span = &request.span;
    let start = span.start.load(Ordering::Relaxed) as usize;
    let length = span.length.load(Ordering::Relaxed) as usize;
    let result = if request.give.load(Ordering::Relaxed) != 0 {
        system::give_to_children(start, length)
    } else {
        MANAGED.store(1, Ordering::SeqCst);
        let forking = channel.forking.load(Ordering::SeqCst) | UNANNOUNCED.load(Ordering::SeqCst);
        match forking {
            0 => {
                let kept = system::keep_from_children(start, length);
                // Also where the range is mapped in part by now: what that kept from children is known by the mark alone.
                let marked = system::mark(start, length);
                // EAGAIN, which the kernel has for mappings that cannot be split, says that a thread forks.
                kept.and(marked).map_err(|_| Errno::ENOMEM)
            }
            _ => Err(Errno::EAGAIN),
        }
    };
    let errno = result.err().map_or(0, |errno| errno.0);
    request.errno.store(errno as u32, Ordering::Relaxed);
    request.answered.store(asked, Ordering::Release);
    futex::wake_all(&request.answered);
}

/// A child whose helper was lost while the supervisor may count on it must not run on: it would not
/// notice the supervisor's end.
pub fn fail_stranded() -> ! {
    die(b"memfold: a forked program lost the supervisor while it was admitted; it is killed, as part of its memory is there\n")
}

/// As above: a child of a prepared fork that found no way to the supervisor.
#[cfg(target_arch = "x86_64")]
pub fn fail_unprepared() -> ! {
    die(b"memfold: a forked program could not start its helper (no room for a thread, a descriptor or a mapping, or the \
        supervisor did not admit it); it is killed, as part of its memory is with the supervisor\n")
}

/// As above, at the supervisor's request.
pub fn fail_lost() -> ! {
    die(b"memfold: a program ended while it forked; its child is killed, as part of its memory is lost\n")
}

/// As above, found by the beacon.
pub fn fail_orphaned() -> ! {
    die(b"memfold: the supervisor is gone; a forked program is killed, as part of its memory went with it\n")
}
