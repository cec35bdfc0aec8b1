//! Children of prepared forks (`prepared.rs`), between the answer to their parents and their hello. Data only.
//!
//! The thread that answered the parent keeps the parent's gate and waits; the one that admits helpers brings the
//! child's userfaultfd, and waits for the copied page states in turn.

use crate::supervised::kernel::Userfaultfd;
use crate::sync::{Mutex, lock};
use crate::time::Instant;
use memfold_sys::hello::TOKEN;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for a child after the answer, in which its parent's page states stand still, and longest wait of a child
/// for these, in which other programs that connect wait, too. Shorter ends more children on a busy host, and where a CPU
/// stands still for seconds, as those of virtual machines do; and those of parents whose other threads change mappings
/// without a pause, or whose page tables are very large. (The simulation lets a thread wait for as long as others have
/// something to do.)
pub(crate) const CHILD_PATIENCE: Duration =
    Duration::from_secs(if cfg!(simulated) { 10_000 } else { 10 });
/// Between two looks for the child. Longer delays each fork.
pub(crate) const LOOK: Duration = Duration::from_micros(20);

/// Children that are expected, by the tokens of their forks. One per group.
pub(crate) struct ExpectedChildren<S>(Mutex<HashMap<u64, Arrival<S>>>);

enum Arrival<S> {
    Expected,
    /// It said hello.
    Here(Userfaultfd),
    /// It has its page states.
    Forked(Arc<S>),
}

impl<S> Default for ExpectedChildren<S> {
    fn default() -> Self {
        ExpectedChildren(Mutex::default())
    }
}

impl<S> ExpectedChildren<S> {
    /// A new token.
    pub(crate) fn expect(&self) -> u64 {
        let token = new_token();
        lock(&self.0).insert(token, Arrival::Expected);
        token
    }

    /// No child is expected any more.
    pub(crate) fn forget(&self, token: u64) {
        lock(&self.0).remove(&token);
    }

    /// The userfaultfd of a child that has said hello, once.
    pub(crate) fn take_here(&self, token: u64) -> Option<Userfaultfd> {
        let mut arrivals = lock(&self.0);
        let arrival = arrivals.get_mut(&token)?;
        match std::mem::replace(arrival, Arrival::Expected) {
            Arrival::Here(uffd) => Some(uffd),
            other => {
                *arrival = other;
                None
            }
        }
    }

    /// A child has its page states. `false` if the thread that admits it has given up.
    pub(crate) fn set_forked(&self, token: u64, child: Arc<S>) -> bool {
        let mut arrivals = lock(&self.0);
        let arrival = arrivals.get_mut(&token);
        arrival.is_some_and(|arrival| {
            *arrival = Arrival::Forked(child);
            true
        })
    }

    /// For the thread that admits helpers: the address space of the child that shows a token, whose userfaultfd
    /// becomes that address space's. Waits until the parent's page states are copied, which takes
    /// milliseconds.
    ///
    /// # Errors
    /// Where there is no such child, or no longer, its userfaultfd unless another thread has taken that.
    pub(crate) fn claim(
        &self,
        token: u64,
        uffd: Userfaultfd,
    ) -> Result<Arc<S>, Option<Userfaultfd>> {
        match lock(&self.0).get_mut(&token) {
            Some(arrival @ Arrival::Expected) => *arrival = Arrival::Here(uffd),
            _ => return Err(Some(uffd)),
        }
        let asked = Instant::now();
        loop {
            let is_forked = match lock(&self.0).get(&token) {
                None => return Err(None),
                Some(arrival) => matches!(arrival, Arrival::Forked(_)),
            };
            if is_forked || asked.elapsed() > CHILD_PATIENCE {
                return match lock(&self.0).remove(&token) {
                    Some(Arrival::Forked(child)) => Ok(child),
                    Some(Arrival::Here(uffd)) => Err(Some(uffd)),
                    _ => Err(None),
                };
            }
            crate::time::sleep(LOOK);
        }
    }
}

#[cfg(not(simulated))]
fn new_token() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the kernel has random numbers");
    u64::from_ne_bytes(bytes) | TOKEN
}

#[cfg(simulated)]
fn new_token() -> u64 {
    crate::simulation::model::next_token() | TOKEN
}
