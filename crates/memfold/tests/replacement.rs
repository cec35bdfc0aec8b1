//! Which pages are kept, by how many come back.

mod common;

use common::{MIB, PAGE, builder, fill_page, userfaultfd_modes, verify_page};
use memfold::{Memfold, Mode, Region};
use memfold_testing::Random;

const REGION: usize = 48 * MIB;
const RESIDENT: usize = 24 * MIB;
const PAGES: usize = REGION / PAGE;

fn filled(mode: Mode) -> (Memfold, Region) {
    let memfold = builder(mode)
        .resident_limit(RESIDENT as u64)
        .build()
        .unwrap();
    let mut region = memfold.map(REGION).unwrap();
    for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
        fill_page(page, number as u64, 1);
    }
    (memfold, region)
}

fn touch(region: &Region, number: usize) {
    verify_page(&region[number * PAGE..][..PAGE], number as u64, 1);
}

/// Pages that come back in a pass over the given pages, as a share of them; the median of the last five of nine.
fn brought_in(memfold: &Memfold, mut pass: impl FnMut() -> usize) -> f64 {
    let mut shares: Vec<f64> = (0..9)
        .map(|_| {
            let before = memfold.stats().pages_in;
            let pages = pass();
            (memfold.stats().pages_in - before) as f64 / pages as f64
        })
        .collect();
    println!("{shares:.2?}");
    let mut last = shares.split_off(4);
    last.sort_by(f64::total_cmp);
    last[2]
}

/// Half of the pages may stay. First in, first out would lose each page just before its use.
#[test]
fn passes_over_too_much_keep_a_part() {
    for mode in userfaultfd_modes() {
        let (memfold, region) = filled(mode);
        let in_order = brought_in(&memfold, || {
            (0..PAGES).for_each(|number| touch(&region, number));
            PAGES
        });
        println!("{mode:?}, in order: {in_order:.2}; the least is {:.2}", 0.5);
        assert!(in_order < 0.75, "{mode:?}: {in_order:.2}");

        let mut order: Vec<usize> = (0..PAGES).collect();
        let mut random = Random::new(1);
        for last in (1..PAGES).rev() {
            order.swap(last, random.below(last + 1));
        }
        let shuffled = brought_in(&memfold, || {
            order.iter().for_each(|number| touch(&region, *number));
            PAGES
        });
        println!("{mode:?}, in another order: {shuffled:.2}");
        assert!(shuffled < 0.75, "{mode:?}: {shuffled:.2}");
    }
}

/// A working set of three quarters of what may stay, which moves on: only what is new in it comes in.
#[test]
fn a_working_set_that_moves_is_kept() {
    const SET: usize = RESIDENT / PAGE * 3 / 4;
    const TOUCHES: usize = 4 * SET;
    for mode in userfaultfd_modes() {
        let (memfold, region) = filled(mode);
        let mut random = Random::new(2);
        let mut first = 0;
        let share = brought_in(&memfold, || {
            for step in 0..TOUCHES {
                if step.is_multiple_of(8) {
                    first += 1;
                }
                touch(&region, (first + random.below(SET)) % PAGES);
            }
            TOUCHES / 8
        });
        println!("{mode:?}: {share:.2} of what is new in the working set; the least is 1");
        assert!(share < 2.0, "{mode:?}: {share:.2}");
    }
}
