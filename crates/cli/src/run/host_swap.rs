//! Warns once, while a run goes on, that the host swaps now, where `UFFDIO_MOVE` is in use and has a bug then.

use memfold_pager::Supervisor;
use memfold_sys::probe::{Forbidden, Managed, known_bugs};
use std::time::{Duration, Instant};

/// Between two looks. Longer leaves the bug unsaid for longer.
const INTERVAL: Duration = Duration::from_secs(10);

/// Watches whether `UFFDIO_MOVE` comes to be what should not be used.
#[derive(Debug)]
pub struct HostSwap {
    /// Whose pages are moved by it; none if they are not, or the warning was given.
    of: Option<Managed>,
    looked: Instant,
}

impl HostSwap {
    /// From now on, for a supervisor of such programs.
    pub fn new(supervisor: &Supervisor, of: Managed) -> HostSwap {
        HostSwap {
            of: (!supervisor.carries()).then_some(of),
            looked: Instant::now(),
        }
    }

    /// Looks if it is time to.
    pub fn look(&mut self) {
        if self.looked.elapsed() < INTERVAL {
            return;
        }
        self.looked = Instant::now();
        if let Some(warning) = self.found(|of| known_bugs(of).forbid) {
            log::warn!("{warning}");
        }
    }

    fn found(&mut self, forbidden: impl FnOnce(Managed) -> Option<Forbidden>) -> Option<String> {
        let warning = forbidden(self.of?)?.while_in_use();
        self.of = None;
        Some(warning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_sys::probe::bugs_of;

    #[test]
    fn it_is_said_once_and_where_pages_are_moved() {
        let forbidden = |_| bugs_of("6.12.30", Managed::Started).forbid;
        let of = |of| HostSwap {
            of,
            looked: Instant::now(),
        };
        let mut moving = of(Some(Managed::Started));
        assert_eq!(moving.found(|_| None), None);
        let warning = moving.found(forbidden).expect("a warning");
        assert!(warning.contains("the host swaps now") && warning.contains("swapoff"));
        assert_eq!(moving.found(forbidden), None);
        assert_eq!(of(None).found(forbidden), None);
    }
}
