//! Addresses of the stage in the program.

use crate::page::PageRange;
use crate::page::VirtualPage;
use crate::page_state::StageIndex;
use crate::range_set::RangeSet;
use crate::supervised::space::AddressSpace;
use std::io;

impl AddressSpace {
    /// The page of a place of the stage.
    pub(crate) fn stage_page(&self, place: StageIndex) -> VirtualPage {
        self.stage().start.plus(u64::from(place.0))
    }

    /// The address of a place of the stage.
    pub(crate) fn stage_address(&self, place: StageIndex) -> u64 {
        self.stage_page(place).address()
    }

    fn stage(&self) -> PageRange {
        let attached = self.attached();
        let attached = attached.expect("only attached spaces stage pages");
        attached.arena.stage
    }

    /// The resident pages of the stage.
    pub(crate) fn in_stage(&self) -> io::Result<RangeSet> {
        self.present(self.stage())
    }

    /// The place of the stage at a page, if the page is in the stage.
    pub(crate) fn place_at(&self, page: VirtualPage) -> Option<StageIndex> {
        let stage = self.attached()?.arena.stage;
        let is_staged = stage.start <= page && page < stage.end;
        is_staged.then(|| StageIndex((page.0 - stage.start.0) as u32))
    }
}
