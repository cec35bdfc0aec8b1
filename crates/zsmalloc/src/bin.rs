//! A bin: the zspages of one size class that belong to one shard, under one lock.

use crate::{
    arena::Arenas,
    class::SizeClass,
    geometry::PageNumber,
    lock::Lock,
    sync::atomic::{AtomicUsize, Ordering},
    word::ObjectWord,
    zspage::{FULLNESS_LISTS, Link, Place, Zspage},
};

/// Pages of empty zspages that the bins of one shard keep for their next allocation.
///
/// A bin takes an allowance for one zspage when its last object goes, and keeps it until it is
/// trimmed, so that storing and freeing one object over and over costs no more than the two.
#[derive(Debug)]
pub(crate) struct Allowance {
    left: AtomicUsize,
}

impl Allowance {
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            left: AtomicUsize::new(pages),
        }
    }

    fn take(&self, pages: usize) -> bool {
        self.left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(pages)
            })
            .is_ok()
    }

    fn give_back(&self, pages: usize) {
        self.left.fetch_add(pages, Ordering::Relaxed);
    }
}

#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Bin {
    pub(crate) state: Lock<BinState>,
}

/// What the lock of a bin guards, the records of its zspages included.
#[derive(Debug)]
pub(crate) struct BinState {
    /// The zspage that is allocated from.
    current: Link,
    /// Other zspages with free slots, by fullness.
    lists: [Link; FULLNESS_LISTS as usize],
    /// Zspages of this bin, full ones included.
    zspages: usize,
    /// Objects in them.
    used: usize,
    /// Whether the bin may keep its current zspage when it is empty.
    has_allowance: bool,
}

/// What all operations on a bin need to know besides its state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BinContext<'a> {
    pub(crate) arenas: &'a Arenas,
    pub(crate) allowance: &'a Allowance,
    pub(crate) class_index: usize,
    pub(crate) class: &'a SizeClass,
}

impl Bin {
    pub(crate) fn new() -> Self {
        Self {
            state: Lock::new(BinState {
                current: Link::NONE,
                lists: [Link::NONE; FULLNESS_LISTS as usize],
                zspages: 0,
                used: 0,
                has_allowance: false,
            }),
        }
    }
}

impl BinState {
    pub(crate) fn zspages(&self) -> usize {
        self.zspages
    }

    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Takes a slot, from the current zspage or else from the fullest.
    #[inline]
    pub(crate) fn allocate(&mut self, context: &BinContext<'_>) -> Option<ObjectWord> {
        let page = match self.current.get() {
            Some(page) => page,
            None => {
                let page = self.take_partial(context.arenas)?;
                context.arenas.zspage(page).set_place(Place::Current);
                self.current = Link::to(page);
                page
            }
        };
        let zspage = context.arenas.zspage(page);
        let word = self.take_slot(context, page, zspage);
        if zspage.place() == Place::Full {
            self.current = Link::NONE;
        }
        Some(word)
    }

    /// Takes a slot of the fullest zspage that is not full, if there is one besides the current, for
    /// an object of a smaller class.
    pub(crate) fn lend(&mut self, context: &BinContext<'_>) -> Option<ObjectWord> {
        let page = self.take_partial(context.arenas)?;
        let zspage = context.arenas.zspage(page);
        let word = self.take_slot(context, page, zspage);
        if zspage.place() != Place::Full {
            self.list(context, page, zspage);
        }
        Some(word)
    }

    /// Takes a slot of a zspage of this bin that has a free one.
    #[inline]
    fn take_slot(
        &mut self,
        context: &BinContext<'_>,
        page: PageNumber,
        zspage: &Zspage,
    ) -> ObjectWord {
        let index = zspage.take_slot().expect("the zspage has a free slot");
        self.used += 1;
        if zspage.used() == context.class.objects() {
            zspage.set_place(Place::Full);
        }
        ObjectWord::new(context.class_index, page, index)
    }

    /// Puts a run of pages into service as a zspage of this bin, and takes a slot.
    pub(crate) fn open(
        &mut self,
        context: &BinContext<'_>,
        page: PageNumber,
        shard: usize,
    ) -> ObjectWord {
        let zspage = context.arenas.zspage(page);
        zspage.put_in_service(context.class_index, context.class.objects(), shard);
        self.adopt(context, page)
    }

    /// Adds a zspage that another bin gave away, and takes a slot of it.
    ///
    /// Not a slot of the current zspage, should another thread of this shard have been faster: a
    /// zspage on a list must hold an object, or no free would ever find it empty.
    pub(crate) fn adopt(&mut self, context: &BinContext<'_>, page: PageNumber) -> ObjectWord {
        self.zspages += 1;
        let zspage = context.arenas.zspage(page);
        self.used += zspage.used();
        let word = self.take_slot(context, page, zspage);
        if zspage.place() != Place::Full {
            if self.current.get().is_some() {
                self.list(context, page, zspage);
            } else {
                zspage.set_place(Place::Current);
                self.current = Link::to(page);
            }
        }
        word
    }

    /// Gives the fullest zspage that is not full away to another bin.
    pub(crate) fn give_away(&mut self, context: &BinContext<'_>, to: usize) -> Option<PageNumber> {
        let page = self.take_partial(context.arenas)?;
        let zspage = context.arenas.zspage(page);
        zspage.set_place(Place::Detached);
        self.zspages -= 1;
        self.used -= zspage.used();
        // Last: from here on frees are done under the other bin's lock.
        zspage.set_owner(to);
        Some(page)
    }

    /// Accounts for a slot of a zspage of this bin that was freed just now. Gives the zspage back
    /// if it is empty and was taken out of the bin and out of service.
    #[inline]
    pub(crate) fn after_free(
        &mut self,
        context: &BinContext<'_>,
        page: PageNumber,
        zspage: &Zspage,
    ) -> Option<PageNumber> {
        self.count_free(zspage);
        self.settle(context, page, zspage)
    }

    /// Counts one object less in a zspage of this bin.
    #[inline]
    pub(crate) fn count_free(&mut self, zspage: &Zspage) {
        // One that is on its way to this bin is counted when it arrives.
        if zspage.place() != Place::Detached {
            self.used -= 1;
        }
    }

    /// Puts a zspage of this bin where it belongs after slots of it were freed. Gives it back if it
    /// is empty and was taken out of the bin and out of service.
    #[inline]
    pub(crate) fn settle(
        &mut self,
        context: &BinContext<'_>,
        page: PageNumber,
        zspage: &Zspage,
    ) -> Option<PageNumber> {
        let used = zspage.used();
        match zspage.place() {
            Place::Listed(list) => {
                if used == 0 {
                    context
                        .arenas
                        .unlink(&mut self.lists[usize::from(list)], page);
                    return Some(self.retire(page, zspage));
                }
                if fullness(used, context.class) != list {
                    context
                        .arenas
                        .unlink(&mut self.lists[usize::from(list)], page);
                    self.list(context, page, zspage);
                }
                None
            }
            Place::Full => {
                if used == 0 {
                    if self.current.get().is_some() || !self.keeps_empty(context) {
                        return Some(self.retire(page, zspage));
                    }
                    // All that it held was freed, at once if it was more than one object.
                    zspage.set_place(Place::Current);
                    self.current = Link::to(page);
                    return None;
                }
                self.list(context, page, zspage);
                None
            }
            Place::Current => {
                if used > 0 || self.keeps_empty(context) {
                    return None;
                }
                self.current = Link::NONE;
                Some(self.retire(page, zspage))
            }
            Place::Isolated | Place::Detached => None,
        }
    }

    /// Puts the current zspage on its list, so that a compactor may take it, if it holds objects.
    pub(crate) fn list_current(&mut self, context: &BinContext<'_>) {
        if let Some(page) = self.current.get() {
            let zspage = context.arenas.zspage(page);
            if zspage.used() > 0 {
                self.current = Link::NONE;
                self.list(context, page, zspage);
            }
        }
    }

    /// Takes the sparsest zspage off its list, for a compactor to empty. It stays the bin's.
    pub(crate) fn isolate(&mut self, arenas: &Arenas) -> Option<PageNumber> {
        let head = self.lists.iter_mut().find(|head| head.get().is_some())?;
        let page = head.get()?;
        arenas.unlink(head, page);
        arenas.zspage(page).set_place(Place::Isolated);
        Some(page)
    }

    /// Puts a zspage back that was isolated, after `freed` of its slots were freed. Gives it back
    /// if it is empty and was taken out of the bin and out of service.
    pub(crate) fn end_isolation(
        &mut self,
        context: &BinContext<'_>,
        page: PageNumber,
        freed: usize,
    ) -> Option<PageNumber> {
        let zspage = context.arenas.zspage(page);
        self.used -= freed;
        if zspage.used() == 0 {
            return Some(self.retire(page, zspage));
        }
        self.list(context, page, zspage);
        None
    }

    /// Takes the empty zspage the bin keeps, if it does.
    pub(crate) fn trim(&mut self, context: &BinContext<'_>) -> Option<PageNumber> {
        if self.has_allowance {
            self.has_allowance = false;
            context.allowance.give_back(context.class.pages());
        }
        let page = self.current.get()?;
        let zspage = context.arenas.zspage(page);
        if zspage.used() > 0 {
            return None;
        }
        self.current = Link::NONE;
        Some(self.retire(page, zspage))
    }

    fn keeps_empty(&mut self, context: &BinContext<'_>) -> bool {
        if !self.has_allowance {
            self.has_allowance = context.allowance.take(context.class.pages());
        }
        self.has_allowance
    }

    fn retire(&mut self, page: PageNumber, zspage: &Zspage) -> PageNumber {
        self.zspages -= 1;
        zspage.take_out_of_service();
        page
    }

    fn list(&mut self, context: &BinContext<'_>, page: PageNumber, zspage: &Zspage) {
        let list = fullness(zspage.used(), context.class);
        zspage.set_place(Place::Listed(list));
        context
            .arenas
            .link(&mut self.lists[usize::from(list)], page);
    }

    fn take_partial(&mut self, arenas: &Arenas) -> Option<PageNumber> {
        let head = self
            .lists
            .iter_mut()
            .rev()
            .find(|head| head.get().is_some())?;
        let page = head.get()?;
        arenas.unlink(head, page);
        Some(page)
    }
}

/// The list for a zspage with `used` objects, fewer than it can hold.
fn fullness(used: usize, class: &SizeClass) -> u8 {
    debug_assert!(used < class.objects());
    (used * usize::from(FULLNESS_LISTS) / class.objects()) as u8
}
