//! Virtual swap slots.

use std::fmt;

/// Slots of a cluster.
pub const CLUSTER_SLOTS: usize = 512;

/// A virtual swap slot: the name of a page that was swapped out.
///
/// It is independent of where the data lies. Slot 0 is never used, so 0 may stand for "no slot".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Slot(u32);

impl Slot {
    /// The slot of a number from [`Slot::into_raw`].
    ///
    /// Any number may be given; the swap space panics when it is asked for a slot that is not in
    /// use.
    pub const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    /// The slot's number.
    pub const fn into_raw(self) -> u32 {
        self.0
    }

    pub(crate) const fn cluster(self) -> ClusterId {
        ClusterId(self.0 / CLUSTER_SLOTS as u32)
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize % CLUSTER_SLOTS
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({}:{})", self.cluster().0, self.index())
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A range of slots with consecutive numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotRange {
    start: Slot,
    count: u32,
}

impl SlotRange {
    /// The `count` slots from `start` on.
    ///
    /// # Panics
    ///
    /// If the numbers would not fit 32 bits.
    pub const fn new(start: Slot, count: u32) -> Self {
        assert!(
            start.0.checked_add(count).is_some(),
            "a range of slots ends at 2^32"
        );
        Self { start, count }
    }

    /// The first slot.
    pub const fn start(self) -> Slot {
        self.start
    }

    /// The number of slots.
    pub const fn count(self) -> u32 {
        self.count
    }

    /// Removes and returns up to `count` slots from the front.
    #[cfg_attr(loom, allow(dead_code))]
    pub(crate) fn split_off_front(&mut self, count: u32) -> Self {
        let front = Self {
            start: self.start,
            count: count.min(self.count),
        };
        *self = Self {
            start: Slot(self.start.0 + front.count),
            count: self.count - front.count,
        };
        front
    }
}

/// Slots collected to be released together: 8 bytes for each run of consecutive slots.
///
/// ```
/// use memfold_swap::{Slot, SlotRanges};
///
/// let slots: SlotRanges = [600, 601, 602, 900].map(Slot::from_raw).into_iter().collect();
/// assert_eq!((slots.slots(), slots.as_slice().len()), (4, 2));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlotRanges {
    ranges: Vec<SlotRange>,
    slots: u64,
}

impl SlotRanges {
    /// No slots.
    pub const fn new() -> Self {
        Self {
            ranges: Vec::new(),
            slots: 0,
        }
    }

    /// Adds a slot. Pages stored together have consecutive slots, which take no more room when
    /// added in order.
    pub fn push(&mut self, slot: Slot) {
        self.slots += 1;
        match self.ranges.last_mut() {
            Some(last) if last.start.0 + last.count == slot.0 => last.count += 1,
            _ => self.ranges.push(SlotRange {
                start: slot,
                count: 1,
            }),
        }
    }

    /// The ranges, in the order in which they were added.
    pub fn as_slice(&self) -> &[SlotRange] {
        &self.ranges
    }

    /// The number of slots in all ranges.
    pub fn slots(&self) -> u64 {
        self.slots
    }
}

impl Extend<Slot> for SlotRanges {
    fn extend<I: IntoIterator<Item = Slot>>(&mut self, slots: I) {
        slots.into_iter().for_each(|slot| self.push(slot));
    }
}

impl FromIterator<Slot> for SlotRanges {
    fn from_iter<I: IntoIterator<Item = Slot>>(slots: I) -> Self {
        let mut ranges = Self::new();
        ranges.extend(slots);
        ranges
    }
}

/// The number of a cluster. Cluster 0 is unused, and slot 0 with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClusterId(pub(crate) u32);

impl ClusterId {
    pub(crate) const fn slot(self, index: usize) -> Slot {
        debug_assert!(index < CLUSTER_SLOTS);
        Slot(self.0 * CLUSTER_SLOTS as u32 + index as u32)
    }

    pub(crate) const fn number(self) -> usize {
        self.0 as usize
    }
}
