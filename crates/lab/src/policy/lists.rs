//! memfold's victims: the two lists of `memfold_pager::replacement` and the clock hand, or the hand alone.
//! They are reclaimed in batches, and see faults only.

use super::{queue::Page, replay::Policy};
use memfold_pager::{
    PageRange, VirtualPage,
    replacement::{Age, List, Replacement, Shadow},
};

#[derive(Debug, Clone, Copy)]
enum Place {
    Untouched,
    Resident,
    Out(Shadow),
}

/// Memory with a clock hand in address order.
#[derive(Debug)]
pub struct Lists {
    pages: Vec<Place>,
    room: usize,
    batch: usize,
    resident: usize,
    hand: usize,
    now: Age,
    /// `None`: the hand alone.
    replacement: Option<Replacement>,
}

impl Lists {
    /// Pages reclaimed at once, as by memfold's reclaimer.
    const BATCH: usize = 64;

    /// memfold's two lists, with memory of `room` of `pages` pages.
    pub fn new(pages: usize, room: usize) -> Self {
        Self {
            replacement: Some(Replacement::default()),
            ..Self::hand_alone(pages, room)
        }
    }

    /// The hand alone.
    pub fn hand_alone(pages: usize, room: usize) -> Self {
        Self {
            pages: vec![Place::Untouched; pages],
            room,
            batch: Self::BATCH.min(room / 8).max(1),
            resident: 0,
            hand: 0,
            now: Age::default(),
            replacement: None,
        }
    }

    fn reclaim(&mut self) {
        let mut wanted = self.batch;
        let mut samples = 0;
        if let Some(mut replacement) = self.replacement.take() {
            let resident = self.resident as u64;
            let quota = replacement.quota(wanted, resident, resident);
            samples = quota.samples;
            let (mut left, mut to_sample) = (quota.inactive, quota.samples);
            while left > 0
                && let Some(range) = replacement.take_inactive()
            {
                let page = range.start.0 as usize;
                if self.evict(page, List::Inactive, &mut to_sample, Some(&mut replacement)) {
                    left -= 1;
                    wanted -= 1;
                }
            }
            replacement.activate_oldest();
            self.replacement = Some(replacement);
        }
        let mut replacement = self.replacement.take();
        if let Some(replacement) = replacement.as_mut().filter(|lists| !lists.is_fifo()) {
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
        while wanted > 0 {
            let page = self.hand;
            self.hand = (self.hand + 1) % self.pages.len();
            if self.evict(page, List::Active, &mut samples, replacement.as_mut()) {
                wanted -= 1;
            }
        }
        self.replacement = replacement;
    }

    /// Evicts a page if it is resident; the first `samples` of a batch as samples.
    fn evict(
        &mut self,
        page: usize,
        list: List,
        samples: &mut usize,
        replacement: Option<&mut Replacement>,
    ) -> bool {
        if !matches!(self.pages[page], Place::Resident) {
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

impl Policy for Lists {
    fn is_resident(&self, page: Page) -> bool {
        matches!(self.pages[page as usize], Place::Resident)
    }

    fn hit(&mut self, _page: Page) {}

    fn fault(&mut self, page: Page) {
        if self.resident == self.room {
            self.reclaim();
        }
        let place = std::mem::replace(&mut self.pages[page as usize], Place::Resident);
        self.resident += 1;
        if let (Place::Out(shadow), Some(replacement)) = (place, &mut self.replacement)
            && replacement.refault(shadow, 1, self.now) == List::Inactive
        {
            let start = VirtualPage(u64::from(page));
            let end = start.plus(1);
            replacement.add_inactive(PageRange { start, end });
        }
    }

    fn resident(&self) -> usize {
        self.resident
    }
}
