//! Peers that connected and have not sent a hello yet.
//!
//! Their number and time are bounded. If the table is full, the user with most of them loses the
//! oldest, so no user keeps another user's programs out.

use crate::time::Instant;
use std::collections::HashMap;
use std::time::Duration;

/// How many there can be, by the number of descriptors that this process may have: each takes three. More let more programs
/// begin at once of which the supervisor knows before they have said hello.
const MOST: u64 = 1024;
/// The same where there are few descriptors.
const MOST_OF_FEW: u64 = 128;
/// Descriptors of this process for each peer, between these bounds.
const DESCRIPTORS_EACH: u64 = 16;

/// How long one may take to say hello. It is one message after the connection, but a program may be
/// stopped just then.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// The first token; those of address spaces count from 1 and never come near.
pub(crate) const FIRST_TOKEN: u64 = 1 << 63;

/// A peer that has not sent a hello yet.
#[derive(Debug)]
pub(crate) struct PendingPeer<T> {
    /// Its user, when it connected.
    pub user: u32,
    /// It was lent what it needs to say hello again.
    pub is_lent: bool,
    /// By what it is known.
    pub identity: T,
    since: Instant,
}

/// The table of pending peers.
#[derive(Debug)]
pub(crate) struct PendingPeers<T> {
    most: usize,
    waiting: HashMap<u64, PendingPeer<T>>,
    next: u64,
}

impl<T> PendingPeer<T> {
    pub(crate) fn new(user: u32, identity: T) -> PendingPeer<T> {
        PendingPeer {
            user,
            is_lent: false,
            identity,
            since: Instant::now(),
        }
    }

    /// Whether it has had its time.
    pub(crate) fn is_late(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= DEADLINE
    }
}

impl<T> PendingPeers<T> {
    /// A table for a process with this limit of descriptors, if it has one.
    pub(crate) fn new(descriptors: Option<u64>) -> PendingPeers<T> {
        let by_limit = |limit: u64| (limit / DESCRIPTORS_EACH).clamp(MOST_OF_FEW, MOST);
        let most = descriptors.map_or(MOST, by_limit);
        PendingPeers {
            most: most as usize,
            waiting: HashMap::new(),
            next: FIRST_TOKEN,
        }
    }

    /// The token of the one that comes next.
    pub(crate) fn next_token(&self) -> u64 {
        self.next
    }

    /// Adds one with [`PendingPeers::next_token`]. Returns the peer that was removed for it.
    pub(crate) fn add(&mut self, peer: PendingPeer<T>) -> Option<PendingPeer<T>> {
        let gone = (self.waiting.len() >= self.most)
            .then(|| self.oldest_of_most())
            .flatten();
        let gone = gone.and_then(|token| self.waiting.remove(&token));
        self.waiting.insert(self.next, peer);
        self.next += 1;
        gone
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Takes one out.
    pub(crate) fn take(&mut self, token: u64) -> Option<PendingPeer<T>> {
        self.waiting.remove(&token)
    }

    /// Takes out those that have had their time.
    pub(crate) fn take_late(&mut self, now: Instant) -> Vec<PendingPeer<T>> {
        let late = self.waiting.iter();
        let late = late.filter(|(_, peer)| peer.is_late(now));
        let tokens: Vec<u64> = late.map(|(token, _)| *token).collect();
        tokens
            .iter()
            .filter_map(|token| self.waiting.remove(token))
            .collect()
    }

    /// The oldest peer of the user with the most; of several such users, the oldest.
    fn oldest_of_most(&self) -> Option<u64> {
        // Tokens count up.
        let mut users: HashMap<u32, (usize, u64)> = HashMap::new();
        for (token, peer) in &self.waiting {
            let (count, oldest) = users.entry(peer.user).or_insert((0, *token));
            *count += 1;
            *oldest = (*oldest).min(*token);
        }
        let most = users.into_values();
        let most = most.max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest)));
        most.map(|(_, oldest)| oldest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FEW_DESCRIPTORS: Option<u64> = Some(1024);

    #[test]
    fn many_programs_can_begin_at_once_where_descriptors_allow_it() {
        for (descriptors, most) in [(Some(256), 128), (Some(8192), 512), (None, 1024)] {
            let mut pending = PendingPeers::new(descriptors);
            for _ in 0..most {
                assert!(pending.add(PendingPeer::new(1000, ())).is_none());
            }
            assert!(pending.add(PendingPeer::new(1000, ())).is_some());
        }
    }

    #[test]
    fn one_user_cannot_fill_the_list() {
        let mut pending = PendingPeers::new(FEW_DESCRIPTORS);
        let victim = pending.next_token();
        assert!(pending.add(PendingPeer::new(0, "victim")).is_none());
        let first = pending.next_token();
        for _ in 0..10 * pending.most {
            if let Some(gone) = pending.add(PendingPeer::new(65_534, "flood")) {
                assert_eq!(gone.user, 65_534);
            }
        }
        assert_eq!(pending.len(), pending.most);
        assert!(pending.take(first).is_none(), "the oldest of them went");
        assert_eq!(pending.take(victim).map(|one| one.identity), Some("victim"));
    }

    #[test]
    fn one_with_many_users_cannot_fill_the_list_either() {
        let mut pending = PendingPeers::new(FEW_DESCRIPTORS);
        for user in 0..pending.most as u32 {
            pending.add(PendingPeer::new(100_000 + user, "flood"));
        }
        let victim = pending.next_token();
        let gone = pending.add(PendingPeer::new(0, "victim"));
        assert_eq!(gone.map(|one| one.user), Some(100_000), "the oldest");
        pending.add(PendingPeer::new(200_000, "flood"));
        assert!(pending.take(victim).is_some());
    }

    #[test]
    fn who_says_nothing_goes() {
        let mut pending = PendingPeers::new(FEW_DESCRIPTORS);
        let token = pending.next_token();
        pending.add(PendingPeer::new(0, ()));
        let now = Instant::now();
        assert!(pending.take_late(now).is_empty());
        assert_eq!(pending.take_late(now + DEADLINE).len(), 1);
        assert!(pending.take(token).is_none());
    }
}
