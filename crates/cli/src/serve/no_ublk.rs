//! Without the feature `ublk` there is no block device of this machine.

use crate::arguments::ServeArguments;
use crate::failure::Failure;
use memfold_disk::Disk;
use memfold_pager::MappedSource;
use std::sync::Arc;

/// A block device, of which there is none.
#[derive(Debug)]
pub enum BlockDevice {}

impl BlockDevice {
    /// None.
    #[expect(clippy::unnecessary_wraps, reason = "as with the feature")]
    pub fn of(
        _arguments: &ServeArguments,
        _disk: &Arc<Disk<MappedSource>>,
    ) -> Result<Option<BlockDevice>, Failure> {
        Ok(None)
    }

    /// Its path.
    pub fn path(&self) -> String {
        match *self {}
    }
}
