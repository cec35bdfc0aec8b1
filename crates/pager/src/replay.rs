//! Memory in which pages leave as `replacement.rs` chooses, in batches as the reclaimer takes them, for tests and for
//! `memfold-lab policy`. It sees faults, and accesses only if it is told of them.

use crate::page::{PageRange, VirtualPage};
use crate::replacement::{Age, List, Replacement, Shadow};

/// Pages reclaimed at once, as by the reclaimer.
const BATCH: usize = 64;

#[derive(Debug, Clone, Copy)]
enum Place {
    Untouched,
    Resident,
    Out(Shadow),
}

/// Memory with a clock hand in address order.
#[derive(Debug)]
pub struct ReplayedMemory {
    pages: Vec<Place>,
    room: usize,
    batch: usize,
    resident: usize,
    hand: usize,
    now: Age,
    /// `None`: the hand alone.
    replacement: Option<Replacement>,
    /// Whether each page was accessed since it came in or was met, where the kernel tells.
    accessed: Option<Vec<bool>>,
}

impl ReplayedMemory {
    /// With the two lists, and room for `room` of `pages` pages.
    pub fn new(pages: usize, room: usize) -> Self {
        Self {
            replacement: Some(Replacement::default()),
            ..Self::with_hand_alone(pages, room)
        }
    }

    /// With the hand alone: approximately first in, first out.
    pub fn with_hand_alone(pages: usize, room: usize) -> Self {
        Self {
            pages: vec![Place::Untouched; pages],
            room,
            batch: BATCH.min(room / 8).max(1),
            resident: 0,
            hand: 0,
            now: Age::default(),
            replacement: None,
            accessed: None,
        }
    }

    /// With the two lists, where the kernel tells which pages were accessed: these stay, of the inactive list as active ones.
    pub fn that_sees_accesses(pages: usize, room: usize) -> Self {
        Self {
            accessed: Some(vec![false; pages]),
            ..Self::new(pages, room)
        }
    }

    /// A resident page is accessed.
    pub fn access(&mut self, page: usize) {
        if let Some(accessed) = &mut self.accessed {
            accessed[page] = true;
        }
    }

    /// Whether a page is resident.
    pub fn is_resident(&self, page: usize) -> bool {
        matches!(self.pages[page], Place::Resident)
    }

    /// Resident pages.
    pub fn resident(&self) -> usize {
        self.resident
    }

    /// Brings in a page that is not resident. Returns whether it was before: whether this is a refault.
    pub fn fault(&mut self, page: usize) -> bool {
        if self.resident == self.room {
            let mut replacement = self.replacement.take();
            self.reclaim(replacement.as_mut());
            self.replacement = replacement;
        }
        if let Some(accessed) = &mut self.accessed {
            accessed[page] = false;
        }
        let place = std::mem::replace(&mut self.pages[page], Place::Resident);
        self.resident += 1;
        let Place::Out(shadow) = place else {
            return false;
        };
        if let Some(replacement) = &mut self.replacement
            && replacement.refault(shadow, 1, self.now) == List::Inactive
        {
            let start = VirtualPage(page as u64);
            let end = start.plus(1);
            replacement.add_inactive(PageRange { start, end });
        }
        true
    }

    fn reclaim(&mut self, mut replacement: Option<&mut Replacement>) {
        let mut wanted = self.batch;
        let mut samples = 0;
        if let Some(replacement) = replacement.as_deref_mut() {
            let resident = self.resident as u64;
            let quota = replacement.quota(wanted, resident, resident);
            samples = quota.samples;
            let (mut left, mut to_sample) = (quota.inactive, quota.samples);
            while left > 0
                && let Some(range) = replacement.take_inactive()
            {
                let page = range.start.0 as usize;
                if self.evict(page, List::Inactive, &mut to_sample, Some(replacement)) {
                    left -= 1;
                    wanted -= 1;
                }
            }
            replacement.activate_oldest();
            if !replacement.is_fifo() {
                let start = replacement.random_below(self.pages.len() as u64) as usize;
                for page in start..self.pages.len() {
                    if samples == 0 || wanted == 0 {
                        break;
                    }
                    if self.evict(page, List::Active, &mut samples, Some(replacement)) {
                        wanted -= 1;
                    }
                }
                samples = 0;
            }
        }
        while wanted > 0 {
            let page = self.hand;
            self.hand = (self.hand + 1) % self.pages.len();
            if self.evict(page, List::Active, &mut samples, replacement.as_deref_mut()) {
                wanted -= 1;
            }
        }
    }

    /// Evicts a page if it is resident; the first `samples` of a batch as samples.
    fn evict(
        &mut self,
        page: usize,
        list: List,
        samples: &mut usize,
        replacement: Option<&mut Replacement>,
    ) -> bool {
        if !self.is_resident(page) {
            return false;
        }
        if let Some(accessed) = &mut self.accessed
            && std::mem::take(&mut accessed[page])
        {
            return false;
        }
        let sample = (*samples > 0).then_some(list);
        *samples = samples.saturating_sub(1);
        self.now = Age(self.now.0.wrapping_add(1));
        if let (Some(replacement), Some(list)) = (replacement, sample) {
            replacement.evicted(self.now, list);
        }
        self.pages[page] = Place::Out(Shadow::new(self.now, sample));
        self.resident -= 1;
        true
    }
}
