//! What the thread that packs blocks of a disk asks of this host.

use memfold_disk::Host;
use memfold_pager::CpuWaiting;
use memfold_sys::thread;

/// Asks the scheduler how long the thread waited for a CPU.
#[derive(Debug, Default)]
pub struct PackingHost {
    before: Option<CpuWaiting>,
}

impl Host for PackingHost {
    fn begin(&mut self) {
        // Clients have priority.
        thread::set_nice(10);
    }

    fn is_idle(&mut self) -> Option<bool> {
        let Some(now) = CpuWaiting::of_this_thread() else {
            log::debug!("the kernel keeps no scheduler statistics: blocks are not packed");
            return None;
        };
        let before = self.before.replace(now);
        Some(before.is_none_or(|before| now.since(before).is_idle()))
    }
}
