//! What must be true of a helper's memory before the helper gets commands.

use crate::supervised::space::AddressSpace;
use memfold_sys::process;

impl AddressSpace {
    /// Whether the stage is sealed anonymous memory, so that reading it never waits for a file that the
    /// program maps over it; always where the kernel does not seal. Read once, before the first command: the
    /// kernel takes some time for each VMA.
    pub fn is_sealed(&self) -> bool {
        let Some(attached) = self.attached() else {
            return false;
        };
        *self.sealed.get_or_init(|| {
            let (stage, inspector) = (attached.arena.stage, &attached.inspector);
            let range = (stage.start.address(), stage.end.address());
            let is_sealed =
                !process::kernel_seals() || inspector.has_sealed(&[range]).unwrap_or(false);
            inspector.close_flags();
            if !is_sealed && !inspector.stands_still() {
                log::warn!(
                    "cannot page out process {}: its helper's memory is not sealed (mseal); the limit may be \
                     exceeded by its size",
                    inspector.pid()
                );
            }
            is_sealed
        })
    }
}
