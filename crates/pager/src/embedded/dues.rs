//! How many victims each list of the replacement owes, and which of them are samples.

use crate::replacement::{List, Quota};

/// Victims that are still to be taken of a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Dues {
    pub(super) inactive: Due,
    pub(super) active: Due,
}

/// Victims that are still to be taken of one list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Due {
    pub(super) victims: usize,
    /// How many of them, the first, are samples.
    pub(super) samples: usize,
}

impl Dues {
    /// All of a quota of `wanted` victims.
    pub(super) fn of(quota: Quota, wanted: usize) -> Dues {
        let due = |victims| Due {
            victims,
            samples: quota.samples.min(victims),
        };
        Dues {
            inactive: due(quota.inactive),
            active: due(wanted - quota.inactive),
        }
    }

    pub(super) fn are_paid(self) -> bool {
        self.inactive.victims == 0 && self.active.victims == 0
    }

    /// The inactive list has no more to give: active pages leave instead.
    pub(super) fn leave_to_active(&mut self) {
        self.active.victims += std::mem::take(&mut self.inactive).victims;
    }
}

/// Victims of a batch, and which of them, the first, are samples of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Samples {
    count: usize,
    list: Option<List>,
}

impl Samples {
    /// The list that a victim is a sample of.
    pub(super) fn of(self, victim: usize) -> Option<List> {
        self.list.filter(|_| victim < self.count)
    }
}

impl Due {
    /// Notes that `taken` victims of the list were taken; says which of them are samples.
    pub(super) fn pay(&mut self, taken: usize, list: List) -> Samples {
        let count = self.samples.min(taken);
        self.victims = self.victims.saturating_sub(taken);
        self.samples -= count;
        Samples {
            count,
            list: Some(list),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_paid_by_both_lists() {
        let quota = Quota {
            inactive: 60,
            samples: 4,
        };
        let mut dues = Dues::of(quota, 64);
        let samples = dues.inactive.pay(16, List::Inactive);
        assert_eq!(samples.of(3), Some(List::Inactive));
        assert_eq!(samples.of(4), None);
        assert_eq!((dues.inactive.victims, dues.inactive.samples), (44, 0));
        let samples = dues.active.pay(4, List::Active);
        assert_eq!(samples.of(3), Some(List::Active));
        assert!(!dues.are_paid());
        dues.leave_to_active();
        assert_eq!((dues.active.victims, dues.active.samples), (44, 0));
        assert_eq!(dues.active.pay(64, List::Active).of(0), None);
        assert!(dues.are_paid());
    }
}
