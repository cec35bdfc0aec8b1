//! Programs that said hello and wait to be admitted until there is room.
//!
//! A program touches its first memory before that is found and registered, so no fault of it waits for room, and none of it
//! can be moved out. Many that start at once would exceed the limit by all of that. So while the group is above its limit, they
//! are admitted one after the other, as room is made: their constructor waits for the welcome. Where others take the room as
//! soon as it is made, one is admitted for each [`PAGES`] that were moved out, and none waits for longer than [`PATIENCE`].
//!
//! Forked children are admitted at once: what is out of them must be served, and what is not they share with their parent.

use crate::time::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Longest time that a program waits. Longer delays its start where nothing can be moved out; shorter lets more start at once.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pages that are moved out before a program is admitted without room. More delays starts beside programs that take all room;
/// fewer lets those that start touch more than was made room for.
const PAGES: u64 = 1024;
/// How many wait at most; each has six descriptors. For one more, the first goes on without room.
const MOST: usize = 128;
/// Pause between two looks for room, and so between two programs. Longer starts programs later; shorter lets more of them in
/// before they have touched what they need.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

/// The group's memory, as of a look.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    pub now: Instant,
    /// It is below its limit.
    pub is_room: bool,
    /// Pages moved out so far.
    pub pages_out: u64,
}

/// Programs that wait, in the order in which they said hello, each with the look at which it did.
#[derive(Debug)]
pub(crate) struct Newcomers<T> {
    waiting: VecDeque<(Look, T)>,
    /// Pages that had been moved out when the last one was admitted.
    admitted_at: u64,
}

impl<T> Newcomers<T> {
    pub(crate) fn new() -> Newcomers<T> {
        Newcomers {
            waiting: VecDeque::new(),
            admitted_at: 0,
        }
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// One more waits. Returns the one that is to be admitted instead, if any is.
    pub(crate) fn add(&mut self, look: Look, newcomer: T) -> Option<T> {
        if self.waiting.is_empty() && look.is_room {
            return Some(newcomer);
        }
        self.waiting.push_back((look, newcomer));
        (self.len() > MOST).then(|| self.take_first(look)).flatten()
    }

    /// Takes the one that is to be admitted now, if any is.
    pub(crate) fn next(&mut self, look: Look) -> Option<T> {
        let (arrived, _) = self.waiting.front()?;
        let moved_out = look.pages_out - arrived.pages_out.max(self.admitted_at);
        let has_waited = look.now.saturating_duration_since(arrived.now) >= PATIENCE;
        (look.is_room || moved_out >= PAGES || has_waited)
            .then(|| self.take_first(look))
            .flatten()
    }

    fn take_first(&mut self, look: Look) -> Option<T> {
        self.admitted_at = look.pages_out;
        self.waiting.pop_front().map(|(_, newcomer)| newcomer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(after: Duration, is_room: bool, pages_out: u64) -> Look {
        static BEGAN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        Look {
            now: *BEGAN.get_or_init(Instant::now) + after,
            is_room,
            pages_out,
        }
    }

    #[test]
    fn they_wait_for_room_in_turn_and_not_for_ever() {
        let (mut newcomers, none) = (Newcomers::new(), Duration::ZERO);
        assert_eq!(newcomers.next(look(none, true, 0)), None);
        assert_eq!(newcomers.add(look(none, true, 0), 0), Some(0));
        for number in 1..=3 {
            assert_eq!(newcomers.add(look(number * PAUSE, false, 0), number), None);
        }
        assert_eq!(newcomers.add(look(none, true, 0), 4), None, "after others");
        assert_eq!(newcomers.next(look(none, false, 0)), None);
        assert_eq!(newcomers.next(look(none, true, 0)), Some(1));
        assert_eq!(newcomers.next(look(PATIENCE + PAUSE, false, 0)), None);
        assert_eq!(
            newcomers.next(look(PATIENCE + 2 * PAUSE, false, 0)),
            Some(2)
        );
        assert_eq!(newcomers.len(), 2);
    }

    #[test]
    fn one_is_admitted_for_what_was_moved_out() {
        let (mut newcomers, none) = (Newcomers::new(), Duration::ZERO);
        let at = |pages_out| look(none, false, pages_out);
        assert!(newcomers.add(at(5000), 1).is_none() && newcomers.add(at(5000), 2).is_none());
        assert_eq!(newcomers.next(at(5000 + PAGES - 1)), None);
        assert_eq!(newcomers.next(at(5000 + PAGES)), Some(1));
        assert_eq!(
            newcomers.next(at(4999 + 2 * PAGES)),
            None,
            "that was for the first"
        );
        assert_eq!(newcomers.next(at(5000 + 2 * PAGES)), Some(2));
    }

    #[test]
    fn there_are_not_many() {
        let mut newcomers = Newcomers::new();
        let look = look(Duration::ZERO, false, 0);
        for number in 0..MOST {
            assert_eq!(newcomers.add(look, number), None);
        }
        for number in 0..3 {
            assert_eq!(newcomers.add(look, MOST + number), Some(number));
        }
        assert_eq!((newcomers.next(look), newcomers.len()), (None, MOST));
    }
}
