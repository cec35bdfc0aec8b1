//! Random accesses and hints against a plain vector.

mod common;

use common::{MIB, PAGE, builder, modes};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Step {
    Write(usize, usize, u8),
    Check(usize, usize),
    WillNeed(usize, usize),
    Cold(usize, usize),
    PageOut(usize, usize),
    DontNeed(usize, usize),
    Pin(usize),
}

const LENGTH: usize = 3 * MIB / 2 + 777;

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..LENGTH, 0..64 * PAGE);
    prop_oneof![
        4 => (range(), any::<u8>()).prop_map(|((start, length), byte)| Step::Write(start, length, byte)),
        3 => range().prop_map(|(start, length)| Step::Check(start, length)),
        1 => range().prop_map(|(start, length)| Step::WillNeed(start, length)),
        1 => range().prop_map(|(start, length)| Step::Cold(start, length)),
        2 => range().prop_map(|(start, length)| Step::PageOut(start, length)),
        1 => range().prop_map(|(start, length)| Step::DontNeed(start, length)),
        1 => (0..LENGTH).prop_map(Step::Pin),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_region_is_a_vector(steps in proptest::collection::vec(step(), 1..120), seed: u64) {
        for mode in modes() {
            let memfold = builder(mode).resident_limit(2 * MIB as u64).build().unwrap();
            let mut region = memfold.map(LENGTH).unwrap();
            // What the limit has to hold besides.
            let mut other = memfold.map(MIB).unwrap();
            let mut oracle = vec![0_u8; LENGTH];
            let mut state = seed | 1;
            for step in &steps {
                let end = |start: usize, length: usize| (start + length).min(LENGTH);
                match *step {
                    Step::Write(start, length, byte) => {
                        for place in start..end(start, length) {
                            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(9);
                            let value = byte ^ (state >> 60) as u8;
                            region[place] = value;
                            oracle[place] = value;
                        }
                    }
                    Step::Check(start, length) => {
                        let range = start..end(start, length);
                        prop_assert!(region[range.clone()] == oracle[range]);
                    }
                    Step::WillNeed(start, length) => region.prefetch(start..end(start, length)).unwrap(),
                    Step::Cold(start, length) => region.mark_cold(start..end(start, length)).unwrap(),
                    Step::PageOut(start, length) => {
                        region.page_out(start..end(start, length)).unwrap();
                    }
                    Step::DontNeed(start, length) => {
                        let range = start..end(start, length);
                        region.discard(range.clone()).unwrap();
                        oracle[range].fill(0);
                    }
                    Step::Pin(start) => {
                        let pin = region.pin(start..).ok();
                        other.fill(state as u8);
                        prop_assert!(pin.is_none_or(|pin| pin[..] == oracle[start..]));
                    }
                }
            }
            prop_assert!(region[..] == oracle[..]);
        }
    }
}
