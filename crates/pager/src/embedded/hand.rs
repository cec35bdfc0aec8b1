//! The clock hand of an engine.

use super::area::Area;
use super::dues::Dues;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Where reclaim continues: the clock hand, and ranges that the program marked cold.
#[derive(Default)]
pub(super) struct Hand {
    pub(super) area: usize,
    pub(super) page: usize,
    pub(super) cold: VecDeque<(Arc<Area>, Range<usize>)>,
    pub(super) dues: Dues,
}
