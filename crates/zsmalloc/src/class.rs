//! Size classes and the length of their zspages.

use crate::{
    geometry::{MAX_CHAIN_PAGES, PAGE_SIZE},
    word::ObjectWord,
};

/// Bytes between two size classes, before classes with equal zspages are merged.
pub const CLASS_STEP: usize = 16;

/// A size class: the layout of its zspages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeClass {
    size: u16,
    pages: u8,
    objects: u16,
}

impl SizeClass {
    /// Bytes of an object's slot. An object may be up to this long.
    pub fn size(&self) -> usize {
        usize::from(self.size)
    }

    /// Pages of a zspage.
    pub fn pages(&self) -> usize {
        usize::from(self.pages)
    }

    /// Objects of a zspage.
    pub fn objects(&self) -> usize {
        usize::from(self.objects)
    }

    /// Bytes of a zspage outside all slots.
    pub fn waste(&self) -> usize {
        self.pages() * PAGE_SIZE - self.objects() * self.size()
    }
}

/// The size classes of a pool, smallest first.
///
/// ```
/// use zsmalloc::{ClassTable, MAX_CHAIN_PAGES};
///
/// let table = ClassTable::new(MAX_CHAIN_PAGES);
/// assert!(table.classes().iter().any(|class| class.size() >= 1000 && class.waste() < 100));
/// ```
#[derive(Debug, Clone)]
pub struct ClassTable {
    classes: Vec<SizeClass>,
    /// For each multiple of `CLASS_STEP`, the class that takes it.
    by_step: Vec<u16>,
}

impl ClassTable {
    /// The classes for zspages of at most `max_chain_pages` pages. Neighbouring sizes whose zspages
    /// have the same numbers of pages and objects share the larger class.
    ///
    /// # Panics
    ///
    /// If `max_chain_pages` is not between 1 and [`MAX_CHAIN_PAGES`], or the heap refuses memory.
    pub fn new(max_chain_pages: usize) -> Self {
        Self::try_new(max_chain_pages).expect("there is memory for a few hundred classes")
    }

    /// Like [`ClassTable::new`]; `None` if the heap refuses memory.
    pub(crate) fn try_new(max_chain_pages: usize) -> Option<Self> {
        assert!((1..=MAX_CHAIN_PAGES).contains(&max_chain_pages));
        let steps = PAGE_SIZE / CLASS_STEP;
        let mut classes: Vec<SizeClass> = Vec::new();
        classes.try_reserve_exact(steps).ok()?;
        let mut by_step = Vec::new();
        by_step.try_reserve_exact(steps + 1).ok()?;
        by_step.resize(steps + 1, 0_u16);
        for step in (1..=steps).rev() {
            let size = step * CLASS_STEP;
            let (pages, objects) = chain_pages(size, max_chain_pages);
            let shared = classes
                .last()
                .is_some_and(|last| last.pages() == pages && last.objects() == objects);
            if !shared {
                classes.push(SizeClass {
                    size: size as u16,
                    pages: pages as u8,
                    objects: objects as u16,
                });
            }
            by_step[step] = (classes.len() - 1) as u16;
        }
        classes.reverse();
        let last = (classes.len() - 1) as u16;
        for class in &mut by_step[1..] {
            *class = last - *class;
        }
        assert!(classes.len() <= ObjectWord::MAX_CLASSES);
        Some(Self { classes, by_step })
    }

    /// The classes, smallest first.
    pub fn classes(&self) -> &[SizeClass] {
        &self.classes
    }

    /// The index of the class for objects of `size` bytes (1 to a page).
    pub(crate) fn index_of(&self, size: usize) -> usize {
        debug_assert!((1..=PAGE_SIZE).contains(&size));
        usize::from(self.by_step[size.div_ceil(CLASS_STEP)])
    }

    pub(crate) fn get(&self, index: usize) -> Option<&SizeClass> {
        self.classes.get(index)
    }
}

/// The number of pages, and of objects, of a zspage for objects of `size` bytes.
///
/// Weighs the bytes left over against the length, because the last object of a zspage keeps all its
/// pages resident: each page must save [`LENGTH_PENALTY`] of the memory. Unlike in the kernel,
/// objects that span two pages cost nothing, as a zspage is contiguous.
fn chain_pages(size: usize, max_pages: usize) -> (usize, usize) {
    // With a bounded number of objects, a longer zspage may hold no more of them.
    let objects = |pages: usize| (pages * PAGE_SIZE / size).min(ObjectWord::MAX_OBJECTS);
    let cost = |pages: usize| {
        let overhead = (pages * PAGE_SIZE) as f64 / (objects(pages) * size) as f64;
        overhead + LENGTH_PENALTY * pages as f64
    };
    let pages = (1..=max_pages)
        .min_by(|&one, &other| cost(one).total_cmp(&cost(other)))
        .expect("there is at least one length");
    (pages, objects(pages))
}

/// Share of a zspage's memory that one page more must save. A larger value gives shorter zspages
/// with more waste. This is the upper end of a range in which utilisation hardly changes.
const LENGTH_PENALTY: f64 = 0.002;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_a_class_that_fits_it() {
        for max in 1..=MAX_CHAIN_PAGES {
            let table = ClassTable::new(max);
            for size in 1..=PAGE_SIZE {
                let index = table.index_of(size);
                let class = table.classes()[index];
                assert!(class.size() >= size, "{size} does not fit {class:?}");
                assert!(class.objects() * class.size() <= class.pages() * PAGE_SIZE);
                assert!(class.pages() <= max);
                assert!(class.objects() <= ObjectWord::MAX_OBJECTS);
                assert!(index == 0 || table.classes()[index - 1].size() < size);
            }
        }
    }

    #[test]
    fn equal_classes_are_merged() {
        let table = ClassTable::new(1);
        // With one page a zspage, every size above half a page holds one object.
        assert_eq!(table.classes()[table.index_of(2049)].size(), PAGE_SIZE);
        assert!(
            table
                .classes()
                .windows(2)
                .all(|pair| pair[0].objects() != pair[1].objects())
        );
        assert!(ClassTable::new(16).classes().len() > table.classes().len());
    }
}
