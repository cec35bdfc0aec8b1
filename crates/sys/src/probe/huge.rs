//! What huge pages the kernel gives, to programs and to the pool.

use super::Check;
use crate::huge::{HUGE_PAGE_SIZE, LEAST_HUGE_SIZE, Setting, setting_of, size_to_ask_for};

/// Huge pages that programs get: the global setting of THP.
pub(super) fn programs() -> Check {
    let found = match Setting::global() {
        Some(Setting::Always) => "always; they are split when part of one is paged out",
        setting => setting.map_or("unknown", Setting::word),
    };
    Check::note("transparent-huge-pages", found, None)
}

/// Huge pages that the pool asks for.
pub(super) fn pool() -> Check {
    let knows_small_ones = Setting::read(&setting_of(LEAST_HUGE_SIZE)).is_some();
    pool_of(size_to_ask_for(), knows_small_ones)
}

/// The same, of a system that may give those of `size` bytes, and knows small ones or does not.
fn pool_of(size: usize, knows_small_ones: bool) -> Check {
    let found = format!("the pool asks for huge pages of {} KiB", size >> 10);
    let remedy = format!(
        "`echo madvise | sudo tee {}` makes filling and emptying it cheaper, until the next boot; \
         programs that ask for huge pages may get such, too",
        setting_of(LEAST_HUGE_SIZE)
    );
    let helps = size == HUGE_PAGE_SIZE && knows_small_ones;
    Check::note("pool-huge-pages", found, helps.then_some(&*remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_help_is_named_only_where_it_would() {
        assert_eq!(pool_of(LEAST_HUGE_SIZE, true).remedy, None);
        assert_eq!(pool_of(HUGE_PAGE_SIZE, false).remedy, None);
        let remedy = pool_of(HUGE_PAGE_SIZE, true).remedy.expect("one helps");
        assert!(remedy.contains("hugepages-64kB/enabled"), "{remedy}");
    }
}
