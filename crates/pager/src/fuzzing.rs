//! What the fuzz targets run on their input. Tests run the same on the corpus and on random bytes.

pub use crate::supervised::events::reorder::fuzzing::events;
pub use crate::supervised::reclaim::batch::fuzzing::outcome;

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a target on the inputs that are kept for it, and on some of random bytes.
    fn replay(target: &str, run: fn(&[u8])) {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/");
        let inputs = std::fs::read_dir(format!("{folder}{target}")).expect("the corpus");
        let mut count = 0;
        for input in inputs {
            run(&std::fs::read(input.expect("an input").path()).expect("its bytes"));
            count += 1;
        }
        assert!(count > 0, "the corpus of {target} is empty");
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 32) as u8
        };
        for length in 0..500 {
            run(&(0..length).map(|_| next()).collect::<Vec<u8>>());
        }
    }

    #[test]
    fn events_may_come_in_any_order() {
        replay("events", events);
    }

    #[test]
    fn a_helper_may_say_anything_of_what_it_moved() {
        replay("outcome", outcome);
    }
}
