//! Where the stage lies in the program.

use crate::page::PageRange;
use crate::page::VirtualPage;
use crate::page_state::StageIndex;
use crate::range_set::RangeSet;
use crate::supervised::space::AddressSpace;
use std::io;

impl AddressSpace {
    /// Where a place of the stage lies in the program.
    pub fn stage_page(&self, place: StageIndex) -> VirtualPage {
        self.stage().start.plus(u64::from(place.0))
    }

    /// The same as an address.
    pub fn stage_address(&self, place: StageIndex) -> u64 {
        self.stage_page(place).address()
    }

    fn stage(&self) -> PageRange {
        let attached = self.attached();
        let attached = attached.expect("only attached spaces stage pages");
        attached.arena.stage
    }

    /// The pages of the stage that are in memory.
    pub fn in_stage(&self) -> io::Result<RangeSet> {
        self.present(self.stage())
    }

    /// The place of the stage that lies at a page, if one does.
    pub fn place_at(&self, page: VirtualPage) -> Option<StageIndex> {
        let stage = self.attached()?.arena.stage;
        let is_staged = stage.start <= page && page < stage.end;
        is_staged.then(|| StageIndex((page.0 - stage.start.0) as u32))
    }
}
