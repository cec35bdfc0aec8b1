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
/// A bin takes an allowance for one zspage when its last object is freed, and keeps it until it is
/// trimmed, so that storing and freeing one object repeatedly makes no zspage.
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

/// The state behind a bin's lock, which also guards the records of its zspages.
#[derive(Debug)]
pub(crate) struct BinState {
    /// The zspage that stores allocate from.
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

/// What operations on a bin need besides its state.
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

    /// Allocates a slot: in the current zspage, or else in the fullest partly used one.
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

    /// Allocates a slot of the fullest partly used zspage other than the current, if there is one,
    /// for an object of a smaller class.
    pub(crate) fn lend(&mut self, context: &BinContext<'_>) -> Option<ObjectWord> {
        let page = self.take_partial(context.arenas)?;
        let zspage = context.arenas.zspage(page);
        let word = self.take_slot(context, page, zspage);
        if zspage.place() != Place::Full {
            self.list(context, page, zspage);
        }
        Some(word)
    }

    /// Allocates a slot of a zspage of this bin that has a free one.
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

    /// Makes a run of pages a zspage of this bin, and allocates a slot of it.
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

    /// Adds a zspage given away by another bin, and allocates a slot of it.
    ///
    /// The slot must come from the new zspage even if another thread of this shard was faster: a
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
        // Last: later frees take the other bin's lock.
        zspage.set_owner(to);
        Some(page)
    }

    /// Accounts for one freed slot of a zspage of this bin. Returns the zspage if it is empty and
    /// was retired.
    #[inline]
    pub(crate) fn after_free(
        &mut self,
        context: &BinContext<'_>,
        page: PageNumber,
        zspage: &Zspage,
    ) -> Option<PageNumber> {
        self.count_free(zspage);
        self.reclassify(context, page, zspage)
    }

    /// Counts a freed object of a zspage of this bin.
    #[inline]
    pub(crate) fn count_free(&mut self, zspage: &Zspage) {
        // A zspage on its way to this bin is counted when it arrives.
        if zspage.place() != Place::Detached {
            self.used -= 1;
        }
    }

    /// Moves a zspage of this bin to the list for its fullness after slots were freed. Returns it
    /// if it is empty and was retired.
    #[inline]
    pub(crate) fn reclassify(
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
                    // A bulk free may free all objects of a full zspage.
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

    /// Puts the current zspage on its list if it holds objects, so that a compactor may take it.
    pub(crate) fn list_current(&mut self, context: &BinContext<'_>) {
        if let Some(page) = self.current.get() {
            let zspage = context.arenas.zspage(page);
            if zspage.used() > 0 {
                self.current = Link::NONE;
                self.list(context, page, zspage);
            }
        }
    }

    /// Takes the sparsest zspage off its list, to be emptied by a compactor. It stays in this bin.
    pub(crate) fn isolate(&mut self, arenas: &Arenas) -> Option<PageNumber> {
        let head = self.lists.iter_mut().find(|head| head.get().is_some())?;
        let page = head.get()?;
        arenas.unlink(head, page);
        arenas.zspage(page).set_place(Place::Isolated);
        Some(page)
    }

    /// Ends the isolation of a zspage after `freed` of its slots were freed. Returns it if it is
    /// empty and was retired.
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

    /// Takes the empty zspage that the bin keeps, if any.
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
