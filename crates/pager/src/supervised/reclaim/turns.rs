//! Whose turn it is: which address spaces rounds are over, in proportion to evictable size.
//!
//! To look at all address spaces before each round would take as long as to move some of the round's pages, with a few
//! hundred of them. So of many, several turns are planned at once.

use crate::supervised::space::AddressSpace;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Address spaces for each turn that is planned at a time. Fewer look at all of them less often, and follow their sizes
/// later. The simulation has few.
const PER_TURN: usize = if cfg!(simulated) { 3 } else { 16 };

/// The next turns, by the IDs of the address spaces. The reclaimer owns it.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    next: VecDeque<u64>,
}

impl Turns {
    /// Keeps the turns of address spaces that may have a round now or later.
    pub(crate) fn retain(&mut self, may_have: impl Fn(u64) -> bool) {
        self.next.retain(|id| may_have(*id));
    }

    /// Takes the first turn of an address space that is free. Turns of others stay: they are next once they are free.
    pub(crate) fn take(&mut self, is_free: impl Fn(u64) -> bool) -> Option<u64> {
        let number = self.next.iter().position(|id| is_free(*id))?;
        self.next.remove(number)
    }

    /// The address space whose turn is next, if any is planned.
    pub(crate) fn first(&self) -> Option<u64> {
        self.next.front().copied()
    }

    /// Plans the next turns of those that are free; the others gain credit meanwhile.
    pub(crate) fn plan(&mut self, candidates: &[Arc<AddressSpace>], is_free: impl Fn(u64) -> bool) {
        let turns = (candidates.len() / PER_TURN).max(1);
        let each = candidates.iter();
        let mut accounts: Vec<Account> = each
            .map(|space| Account::of(space, is_free(space.id)))
            .collect();
        for number in planned(&mut accounts, turns) {
            self.next.push_back(candidates[number].id);
        }
        for (space, Account { credit, .. }) in candidates.iter().zip(accounts) {
            space.clock.credit.store(credit, Ordering::Relaxed);
        }
    }
}

/// What an address space has for its next turn.
#[derive(Debug, Clone, Copy)]
struct Account {
    credit: i64,
    /// What it gains each turn.
    weight: i64,
    /// It may have a turn.
    is_free: bool,
}

impl Account {
    fn of(space: &AddressSpace, is_free: bool) -> Account {
        let unevictable = space.unevictable_pages() as i64;
        Account {
            credit: space.clock.credit.load(Ordering::Relaxed),
            weight: (space.resident_pages() - unevictable).max(1),
            is_free,
        }
    }
}

/// The numbers of those whose turns are next: each turn all gain their weights, and the one with the most of those that are
/// free pays for all.
fn planned(accounts: &mut [Account], turns: usize) -> Vec<usize> {
    let total: i64 = accounts.iter().map(|account| account.weight).sum();
    let mut numbers = Vec::with_capacity(turns);
    if !accounts.iter().any(|account| account.is_free) {
        return numbers;
    }
    for _ in 0..turns {
        for account in &mut *accounts {
            account.credit += account.weight;
        }
        // Of equals, the first.
        let free = accounts
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, account)| account.is_free);
        if let Some((number, _)) = free.max_by_key(|(_, account)| account.credit) {
            accounts[number].credit -= total;
            numbers.push(number);
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts(weights: &[i64]) -> Vec<Account> {
        let each = weights.iter();
        each.map(|weight| Account {
            credit: 0,
            weight: *weight,
            is_free: true,
        })
        .collect()
    }

    #[test]
    fn turns_are_in_proportion_to_size() {
        let mut sizes = accounts(&[1, 6, 1]);
        let turns = planned(&mut sizes, 8);
        assert_eq!(turns, [1, 1, 0, 1, 1, 2, 1, 1]);
        assert!(sizes.iter().all(|account| account.credit == 0));
        let mut equal = accounts(&[5; 4]);
        assert_eq!(planned(&mut equal, 6), [0, 1, 2, 3, 0, 1]);
        assert_eq!(planned(&mut [], 3), []);
    }

    #[test]
    fn those_that_have_a_round_gain_credit() {
        let mut equal = accounts(&[5; 3]);
        equal[0].is_free = false;
        assert_eq!(planned(&mut equal, 4), [1, 2, 1, 2]);
        equal[0].is_free = true;
        assert_eq!(planned(&mut equal, 2), [0, 0]);
        equal.iter_mut().for_each(|account| account.is_free = false);
        assert_eq!(planned(&mut equal, 2), []);
    }

    #[test]
    fn turns_of_those_that_have_a_round_stay_next() {
        let mut turns = Turns {
            next: VecDeque::from([7, 8, 7, 9]),
        };
        assert_eq!(turns.take(|id| id != 7), Some(8));
        assert_eq!(turns.first(), Some(7));
        assert_eq!(turns.take(|_| true), Some(7));
        turns.retain(|id| id != 7);
        assert_eq!(turns.take(|id| id == 7), None);
        assert_eq!(turns.take(|_| true), Some(9));
        assert_eq!(turns.first(), None);
    }
}
