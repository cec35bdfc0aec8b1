//! Steps of a request that wait for the program that made it.
//!
//! To begin and to finish a request (`request.rs`), the events of all of the program's changes must be applied, and
//! no change be in progress at that moment. A program whose threads change mappings all the time may delay that for as
//! long as it likes. The governor serves all programs, so it only tries at each tick. Where the tries keep failing, a
//! thread of its own waits for the program, at most for the time after which events are applied in any case
//! (`events/read.rs`); its result is taken at a later tick.

use memfold_sys::thread::{self, Standing};
use std::collections::HashMap;
use std::io;
use std::thread::JoinHandle;

/// Failed tries in a row, one a tick, after which a thread is started. More delay the request of a program that
/// never pauses; fewer start threads for programs that would have paused.
const MISSED_MOST: u32 = 100;
/// Most threads at a time. More serves more such programs at once; the others are tried at each tick.
const THREADS_MOST: usize = 16;

/// How far a program's step is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress<T> {
    /// No thread was started.
    None,
    /// A thread waits for the program.
    Waits,
    /// It is done, with this result.
    Done(T),
}

/// The threads, and the failed tries of programs without one, by ID of the address space. The governor owns it.
pub(super) struct Waiting<T> {
    threads: HashMap<u64, JoinHandle<T>>,
    missed: HashMap<u64, u32>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Waiting {
            threads: HashMap::new(),
            missed: HashMap::new(),
        }
    }
}

impl<T: Send + 'static> Waiting<T> {
    /// Whether a thread waits for this program, or its result was not taken yet.
    pub(super) fn has(&self, space: u64) -> bool {
        self.threads.contains_key(&space)
    }

    /// Whether a thread waits for this program.
    pub(super) fn is_under_way(&self, space: u64) -> bool {
        let thread = self.threads.get(&space);
        thread.is_some_and(|thread| !thread.is_finished())
    }

    /// Takes the result of this program's thread.
    pub(super) fn take(&mut self, space: u64) -> Progress<T> {
        if self.is_under_way(space) {
            return Progress::Waits;
        }
        match self.threads.remove(&space).map(JoinHandle::join) {
            Some(Ok(result)) => Progress::Done(result),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Progress::None,
        }
    }

    /// Notes that a try succeeded.
    pub(super) fn note_success(&mut self, space: u64) {
        self.missed.remove(&space);
    }

    /// Notes that a try failed. After too many of them, a thread runs the step that `prepare` makes.
    pub(super) fn note_miss<S: FnOnce() -> T + Send + 'static>(
        &mut self,
        space: u64,
        prepare: impl FnOnce() -> io::Result<S>,
    ) {
        let missed = self.missed.entry(space).or_default();
        *missed += 1;
        if *missed < MISSED_MOST || self.threads.len() >= THREADS_MOST || self.has(space) {
            return;
        }
        let thread = std::thread::Builder::new().name("unregister".to_owned());
        let started = prepare().and_then(|step| {
            thread.spawn(|| {
                // As the handlers: it may read events for long.
                thread::set_standing(thread::current_id(), Standing::Before);
                step()
            })
        });
        // Where no thread can be started, the next tick tries again.
        if let Ok(thread) = started {
            self.missed.remove(&space);
            self.threads.insert(space, thread);
        }
    }

    /// Forgets programs that are gone. Their threads end by themselves.
    pub(super) fn forget(&mut self, is_gone: impl Fn(u64) -> bool) {
        self.threads.retain(|id, _| !is_gone(*id));
        self.missed.retain(|id, _| !is_gone(*id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    fn result(waiting: &mut Waiting<u32>, space: u64) -> u32 {
        let began = Instant::now();
        loop {
            match waiting.take(space) {
                Progress::Done(result) => return result,
                Progress::Waits => std::thread::sleep(Duration::from_millis(1)),
                Progress::None => panic!("no thread was started"),
            }
            assert!(began.elapsed() < Duration::from_secs(60), "it never ends");
        }
    }

    /// With a step that ran in the calling thread, this would never end.
    #[test]
    fn only_a_thread_of_its_own_waits_for_a_program_that_never_pauses() {
        let (pauses, pause) = mpsc::channel::<()>();
        let mut waiting = Waiting::default();
        let mut step = Some(move || pause.recv().map_or(0, |()| 7));
        for _ in 1..MISSED_MOST {
            waiting.note_miss(1, || Ok(|| 0));
            assert_eq!(
                waiting.take(1),
                Progress::None,
                "it was waited for too soon"
            );
        }
        waiting.note_miss(1, || Ok(step.take().expect("the first time")));
        assert_eq!(waiting.take(1), Progress::Waits);
        // Others are tried, and waited for, meanwhile.
        (0..MISSED_MOST).for_each(|_| waiting.note_miss(2, || Ok(|| 8)));
        assert_eq!(result(&mut waiting, 2), 8);
        assert!(waiting.is_under_way(1) && waiting.has(1));
        pauses.send(()).expect("it waits");
        assert_eq!(result(&mut waiting, 1), 7);
        assert_eq!(waiting.take(1), Progress::None);
    }

    #[test]
    fn tries_of_one_program_do_not_count_for_another() {
        let mut waiting = Waiting::default();
        for _ in 1..MISSED_MOST {
            waiting.note_miss(1, || Ok(|| 1));
            waiting.note_miss(2, || Ok(|| 2));
        }
        waiting.note_success(1);
        waiting.note_miss(1, || Ok(|| 1));
        waiting.note_miss(2, || Ok(|| 2));
        assert!(!waiting.has(1) && waiting.has(2));
    }

    #[test]
    fn there_are_not_more_threads_than_that() {
        let (pauses, pause) = mpsc::channel::<()>();
        let pause = std::sync::Arc::new(std::sync::Mutex::new(pause));
        let mut waiting = Waiting::default();
        let all = 0..THREADS_MOST as u64 + 3;
        for space in all.clone() {
            let pause = pause.clone();
            let wait = move || pause.lock().expect("a lock").recv().is_ok();
            for _ in 1..MISSED_MOST {
                waiting.note_miss(space, || Ok(|| false));
            }
            waiting.note_miss(space, || Ok(wait));
        }
        let started = all.filter(|space| waiting.has(*space)).count();
        assert_eq!(started, THREADS_MOST);
        drop(pauses);
        waiting.forget(|_| true);
        assert!(!waiting.has(0));
    }

    #[test]
    fn where_memory_is_short_the_next_tick_tries_again() {
        let mut waiting = Waiting::default();
        for _ in 0..=MISSED_MOST {
            waiting.note_miss(1, || {
                Err::<fn() -> u32, _>(io::ErrorKind::OutOfMemory.into())
            });
        }
        assert!(!waiting.has(1));
        waiting.note_miss(1, || Ok(|| 1));
        assert_eq!(result(&mut waiting, 1), 1);
    }
}
