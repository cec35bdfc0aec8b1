//! Entry points of the fuzz targets. Tests run them on the corpus and on random bytes.

pub use crate::supervised::events::reorder::fuzzing::events;
pub use crate::supervised::reclaim::batch::fuzzing::outcome;

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testing::replay;

    #[test]
    fn events_may_come_in_any_order() {
        replay("events", events);
    }

    #[test]
    fn a_helper_may_say_anything_of_what_it_moved() {
        replay("outcome", outcome);
    }
}
