//! The supervisor's end of a [`Channel`].

use crate::channel::{
    CHANNEL_BYTES, Channel, Command, DropRun, MoveRun, RELEASED, RUNS_MAX, WITHHELD_MOST,
};
use crate::futex;
use crate::gate::{Gate, HelperGate};
use crate::memory::{Mapping, sealed_file};
use crate::thread::{RobustEntry, RobustList};
use crate::{Errno, PAGE_SIZE};
use std::io;
use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Distance from a channel's robust link to its futex, for [`RobustList::for_current_thread`]. The
/// link is at the start of the supervisor's own page in front of the channel: were it in the
/// channel, a program could cut the list, and others would wait for ever for a supervisor that died.
pub const ROBUST_OFFSET: i64 = (PAGE_SIZE + offset_of!(Channel, alive)) as i64;

/// What became of a command.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Nothing was moved: an event came in between. The drops were done all the same.
    pub stale: bool,
    /// The drop runs, with their errors.
    pub drops: Vec<DropRun>,
    /// The move runs, with what was moved.
    pub moves: Vec<MoveRun>,
}

/// A request to unregister a range, as the program wrote it: nothing of it is checked.
#[derive(Debug, Clone, Copy)]
pub struct UnregisterWanted {
    /// Which request it is.
    pub number: u32,
    /// It was answered, and the program has not come to its own registering.
    pub is_answered: bool,
    /// First address.
    pub start: u64,
    /// Bytes.
    pub length: u64,
}

/// A channel in the supervisor. The command protocol (one at a time) is the caller's to keep:
/// [`Port::post`] and [`Port::outcome`] take `&mut`.
#[derive(Debug)]
pub struct Port {
    shared: Arc<SharedChannel>,
    posted: u32,
    /// The outcome of the last command was not taken yet. (The program could write over `done`.)
    outstanding: bool,
}

/// The part that any thread may use at any time: the gates and the event count.
#[derive(Debug)]
pub struct SharedChannel {
    /// In the supervisor's memory: the program cannot write to it.
    gate: Gate,
    mapping: Mapping,
    robust: Option<Arc<RobustList>>,
}

impl SharedChannel {
    fn channel(&self) -> &Channel {
        // SAFETY: behind its first page the mapping is CHANNEL_BYTES of shared memory, page aligned,
        // that cannot shrink (sealed) and lives as long as self; any bytes are a valid `Channel`,
        // whose fields are atomics but for the command, which `Port` guards.
        unsafe {
            self.mapping
                .start()
                .add(PAGE_SIZE)
                .cast::<Channel>()
                .as_ref()
        }
    }

    #[expect(clippy::cast_ptr_alignment, reason = "a mapping is page aligned")]
    fn robust_link(&self) -> *const AtomicU64 {
        self.mapping.start().as_ptr().cast::<AtomicU64>()
    }

    /// The address space's gate.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// The helper's part of it.
    pub fn helper_gate(&self) -> &HelperGate {
        &self.channel().gate
    }

    /// Whether a thread of the program is about to fork, forks or has just done so.
    pub fn is_forking(&self) -> bool {
        // SeqCst: see `HelperGate::wait_open`.
        self.channel().forking.load(Ordering::SeqCst) != 0
    }

    /// Events applied so far.
    pub fn event_count(&self) -> u32 {
        self.channel().event_count.load(Ordering::Relaxed)
    }

    /// The run of the command that the helper carries off, or was the last to. The program may write anything there.
    pub fn carrying(&self) -> Option<usize> {
        let number = self.channel().carrying.load(Ordering::SeqCst);
        number.checked_sub(1).map(|index| index as usize)
    }

    /// Notes that the event of a run which the helper carried off was read. The gate must be held exclusively.
    pub fn note_carried(&self) {
        self.channel().carried.fetch_add(1, Ordering::Release);
    }

    /// Notes that an event is being applied: planned moves become stale. The gate must be held
    /// exclusively.
    pub fn bump_event_count(&self) {
        self.channel().event_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes the helper exit with that status, the process's own from then on. To be repeated until it has:
    /// a wake-up can fall between its look and its sleep.
    pub fn dismiss_helper(&self, status: u16) {
        let channel = self.channel();
        channel
            .dismissed
            .store(u32::from(status) + 1, Ordering::Release);
        futex::wake(&channel.alive, 1);
    }

    /// Makes the helper leave the program, of which nothing is out, and which no thread is just forking. To be repeated, as
    /// above.
    pub fn release_helper(&self) {
        let channel = self.channel();
        channel.dismissed.store(RELEASED, Ordering::Release);
        futex::wake(&channel.alive, 1);
    }

    /// The range that the program wants to be unregistered, until it reports that it has registered the range.
    pub fn unregister_wanted(&self) -> Option<UnregisterWanted> {
        let request = &self.channel().unregister;
        // Acquire: the range is written before.
        let number = request.asked.load(Ordering::Acquire);
        if number == request.over.load(Ordering::Relaxed) {
            return None;
        }
        Some(UnregisterWanted {
            number,
            is_answered: request.answered.load(Ordering::Relaxed) == number,
            start: request.start.load(Ordering::Relaxed),
            length: request.length.load(Ordering::Relaxed),
        })
    }

    /// Tells the thread that waits for an answer to be patient.
    pub fn note_unregister_progress(&self) {
        let request = &self.channel().unregister;
        request.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// Answers a request: memfold has let go of the range, or cannot.
    pub fn answer_unregister(&self, number: u32) {
        let request = &self.channel().unregister;
        request.answered.store(number, Ordering::Release);
        futex::wake_all(&request.answered);
    }

    /// Whether the program's forks are prepared by its library.
    pub fn set_prepared(&self) {
        self.channel().fork.prepared.store(1, Ordering::Relaxed);
    }

    /// What a forking thread asks for that reads the beacon: [`ASK_FORK`](crate::channel::ASK_FORK) or others.
    pub fn fork_asked(&self) -> u32 {
        // Acquire: it was written before the beacon was read.
        self.channel().fork.asked.load(Ordering::Acquire)
    }

    /// Lists the VMAs that a forking thread gives to its child, or that a child is to withhold. `false` if there are
    /// too many. To be read by a thread that the caller wakes, or welcomes, afterwards.
    pub fn list_withheld(&self, token: u64, spans: &[(u64, u64)]) -> bool {
        let fork = &self.channel().fork;
        if spans.len() > WITHHELD_MOST {
            return false;
        }
        for (place, (start, end)) in fork.spans.iter().zip(spans) {
            place.start.store(*start, Ordering::Relaxed);
            place.length.store(end - start, Ordering::Relaxed);
        }
        fork.token.store(token, Ordering::Relaxed);
        fork.count.store(spans.len() as u32, Ordering::Release);
        true
    }

    /// Where the forking thread's restartable sequence is, as it says: the address, and how many bytes.
    pub fn fork_thread(&self) -> (u64, u64) {
        let span = &self.channel().fork.sequence;
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        (load(&span.start), load(&span.length))
    }

    /// How far the forking thread is ([`fork_step`](crate::channel::fork_step)).
    pub fn fork_step(&self) -> u32 {
        // Acquire: what it did before is seen.
        self.channel().fork.step.load(Ordering::Acquire)
    }

    /// Tells the forking thread what to do next.
    pub fn set_fork_step(&self, step: u32) {
        let word = &self.channel().fork.step;
        // Release: the list is seen with it.
        word.store(step, Ordering::Release);
        futex::wake_all(word);
    }

    /// Wakes the helper for a command that was posted, which it sleeps through if it was stopped meanwhile, or lacked a CPU
    /// between its look and its sleep.
    pub fn wake_helper(&self) {
        futex::wake(&self.channel().alive, 1);
    }

    /// Whether the helper has yet to answer a request to withhold or give. Wakes it then: whoever asked may have given up
    /// before it came to sleep.
    pub fn is_withholding(&self) -> bool {
        let channel = self.channel();
        let request = &channel.withhold;
        // Acquire: what it did is done. SeqCst: the helper that reads a request which is made after this sees a fork that
        // was announced before.
        let is_outstanding =
            request.answered.load(Ordering::Acquire) != request.asked.load(Ordering::SeqCst);
        if is_outstanding {
            futex::wake(&channel.alive, 1);
        }
        is_outstanding
    }

    /// Asks the helper to keep a range from forked children, and waits for at most `timeout`.
    ///
    /// # Errors
    /// What the kernel answered, `EAGAIN` while a thread forks, `ETIMEDOUT`.
    pub fn withhold(&self, start: u64, length: u64, timeout: Duration) -> Result<(), Errno> {
        self.change_withheld((start, length), false, timeout)
    }

    /// Asks the helper to give a range to forked children again.
    ///
    /// # Errors
    /// What the kernel answered, `ETIMEDOUT`.
    pub fn give(&self, start: u64, length: u64, timeout: Duration) -> Result<(), Errno> {
        self.change_withheld((start, length), true, timeout)
    }

    fn change_withheld(
        &self,
        (start, length): (u64, u64),
        give: bool,
        timeout: Duration,
    ) -> Result<(), Errno> {
        // The helper may be about to read the one before, which was given up.
        if self.is_withholding() {
            return Err(Errno::ETIMEDOUT);
        }
        let channel = self.channel();
        let request = &channel.withhold;
        request.span.start.store(start, Ordering::Relaxed);
        request.span.length.store(length, Ordering::Relaxed);
        request.give.store(u32::from(give), Ordering::Relaxed);
        // Release: the helper reads the range after the number. SeqCst: see `is_withholding`.
        let number = request.asked.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        let deadline = Instant::now() + timeout;
        loop {
            let answered = request.answered.load(Ordering::Acquire);
            if answered == number {
                return match request.errno.load(Ordering::Relaxed) {
                    0 => Ok(()),
                    errno => Err(Errno(errno as i32)),
                };
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Errno::ETIMEDOUT);
            }
            // Again and again: a wake-up can fall between the helper's look and its sleep.
            futex::wake(&channel.alive, 1);
            let nap = left.min(Duration::from_micros(500)).as_nanos() as u64;
            let _ = futex::wait(&request.answered, answered, Some(nap));
        }
    }

    /// Waits until a command other than `done` is done, at most `timeout`.
    pub fn wait_done(&self, posted: u32, timeout: Duration) -> bool {
        let channel = self.channel();
        let deadline = Instant::now() + timeout;
        loop {
            let done = channel.done.load(Ordering::Acquire);
            if done == posted {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            // A wake-up that fell between the helper's look and its sleep is given again.
            if channel.seen.load(Ordering::Acquire) != posted {
                futex::wake(&channel.alive, 1);
            }
            let nap = left.min(Duration::from_micros(500)).as_nanos() as u64;
            let _ = futex::wait(&channel.done, done, Some(nap));
        }
    }
}

impl Drop for SharedChannel {
    fn drop(&mut self) {
        if let Some(robust) = &self.robust {
            robust.remove(self.robust_link());
        }
    }
}

impl Port {
    /// Makes a channel watched by `robust`, and the descriptor to hand to the program.
    pub fn create(robust: Arc<RobustList>) -> io::Result<(Port, OwnedFd)> {
        let file = sealed_file(CHANNEL_BYTES)?;
        let mapping = Mapping::shared_behind_own_page(&file, CHANNEL_BYTES)?;
        let mut shared = SharedChannel {
            gate: Gate::new(),
            mapping,
            robust: None,
        };
        let channel = shared.channel();
        let entry = RobustEntry {
            futex: &raw const channel.alive,
            link: shared.robust_link(),
        };
        // SAFETY: the mapping lives until `SharedChannel::drop`, which removes the entry first.
        if !unsafe { robust.add(entry) } {
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                "robust list is full",
            ));
        }
        shared.robust = Some(robust);
        Ok((
            Port {
                shared: Arc::new(shared),
                posted: 0,
                outstanding: false,
            },
            file,
        ))
    }

    /// The part that any thread may use.
    pub fn shared(&self) -> &Arc<SharedChannel> {
        &self.shared
    }

    /// The number of the last command.
    pub fn posted(&self) -> u32 {
        self.posted
    }

    /// Whether the last command is done.
    pub fn is_done(&self) -> bool {
        self.shared.channel().done.load(Ordering::Acquire) == self.posted
    }

    /// Posts a command and wakes the helper. The outcome of the one before must have been taken.
    ///
    /// # Panics
    /// If it is not, or if there are too many runs.
    pub fn post(&mut self, event_count: u32, drops: &[DropRun], moves: &[MoveRun]) {
        assert!(!self.outstanding, "one command at a time");
        assert!(
            drops.len() <= RUNS_MAX && moves.len() <= RUNS_MAX,
            "too many runs"
        );
        let channel = self.shared.channel();
        let command: *mut Command = channel.command();
        // SAFETY: the command before is done, so the command is this end's alone (`&mut self`);
        // the program may scribble on its own memory, which yields other numbers, never
        // undefined behaviour here: only integers are read back.
        unsafe {
            (*command).event_count = event_count;
            (*command).drop_count = drops.len() as u32;
            (*command).move_count = moves.len() as u32;
            (*command).stale = 0;
            for (index, run) in drops.iter().enumerate() {
                (&raw mut (*command).drops[index]).write(*run);
            }
            for (index, run) in moves.iter().enumerate() {
                (&raw mut (*command).moves[index]).write(*run);
            }
        }
        channel.carrying.store(0, Ordering::SeqCst);
        self.posted = self.posted.wrapping_add(1);
        self.outstanding = true;
        channel.posted.store(self.posted, Ordering::Release);
        futex::wake(&channel.alive, 1);
    }

    /// What became of the last command; `None` while it is not done. `drops` and `moves` are the
    /// lengths that were posted.
    pub fn outcome(&mut self, drops: usize, moves: usize) -> Option<Outcome> {
        if !self.outstanding || !self.is_done() {
            return None;
        }
        self.outstanding = false;
        let command: *const Command = self.shared.channel().command();
        // SAFETY: as in `post`; `done` was read with acquire, so the outcome is visible.
        unsafe {
            Some(Outcome {
                stale: (&raw const (*command).stale).read_volatile() != 0,
                drops: (0..drops.min(RUNS_MAX))
                    .map(|index| (&raw const (*command).drops[index]).read_volatile())
                    .collect(),
                moves: (0..moves.min(RUNS_MAX))
                    .map(|index| (&raw const (*command).moves[index]).read_volatile())
                    .collect(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A channel that no thread's death is noticed of.
    fn channel() -> SharedChannel {
        let file = sealed_file(CHANNEL_BYTES).expect("memory");
        SharedChannel {
            gate: Gate::new(),
            mapping: Mapping::shared_behind_own_page(&file, CHANNEL_BYTES).expect("memory"),
            robust: None,
        }
    }

    /// The helper lacks a CPU between its look and its sleep for as long as the supervisor waits.
    #[test]
    fn a_request_is_seen_that_was_given_up_before_the_helper_slept() {
        type Look = fn(&SharedChannel) -> bool;
        let looks: [Look; 3] = [
            SharedChannel::is_withholding,
            |shared| shared.withhold(0, 0, Duration::ZERO) == Err(Errno::ETIMEDOUT),
            |shared| {
                shared.wake_helper();
                true
            },
        ];
        for look in looks {
            let shared = channel();
            let asked = shared.withhold(1 << 20, 1 << 12, Duration::ZERO);
            assert_eq!(asked, Err(Errno::ETIMEDOUT));
            std::thread::scope(|scope| {
                let helper = scope.spawn(|| {
                    let channel = shared.channel();
                    let alive = channel.alive.load(Ordering::Acquire);
                    let began = Instant::now();
                    let _ = futex::wait(&channel.alive, alive, Some(5_000_000_000));
                    began.elapsed()
                });
                while !helper.is_finished() {
                    assert!(look(&shared), "nobody has answered");
                    std::thread::sleep(Duration::from_millis(1));
                }
                let slept = helper.join().expect("it ends");
                assert!(slept < Duration::from_secs(4), "it slept for {slept:?}");
            });
        }
    }
}
