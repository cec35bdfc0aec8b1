//! Children of prepared forks (`prepared.rs`), between the answer to their parents and their hello. Data only.
//!
//! The thread that answered the parent keeps the parent's gate and waits; the one that admits helpers brings the
//! child's userfaultfd, and admits the child once the page states are copied. It waits for none, as others of the
//! parent's threads decide how long that takes, and other programs' children say hello meanwhile.

use crate::supervised::kernel::Userfaultfd;
use crate::sync::{Mutex, lock};
use memfold_sys::hello::TOKEN;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Longest wait for a child after the answer, in which its parent's page states stand still, and longest wait of a child
/// for these. Shorter ends more children on a busy host, and where a CPU
/// stands still for seconds, as those of virtual machines do; and those of parents whose other threads change mappings
/// without a pause, or whose page tables are very large. (The simulation lets a thread wait for as long as others have
/// something to do.)
pub(crate) const CHILD_PATIENCE: Duration =
    Duration::from_secs(if cfg!(simulated) { 10_000 } else { 10 });
/// Between two looks for the child. Longer delays each fork.
pub(crate) const LOOK: Duration = Duration::from_micros(20);

/// Children that are expected, by the tokens of their forks. One per group.
pub(crate) struct ExpectedChildren<S> {
    arrivals: Mutex<HashMap<u64, Arrival<S>>>,
    /// Wakes the thread that admits helpers.
    wake: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Nanoseconds in which that thread did not listen. Relaxed: only counted.
    busy: AtomicU64,
}

enum Arrival<S> {
    Expected,
    /// It said hello.
    Here(Userfaultfd),
    /// Its page states are copied.
    Taken,
    /// It said hello, and its parent's fork is over without it.
    Over(Userfaultfd),
    /// It has its page states.
    Forked(Arc<S>),
}

/// What has become of a child that said hello.
#[derive(Debug)]
pub(crate) enum Admission<S> {
    NotYet,
    /// It has its page states.
    Forked(Arc<S>),
    /// It will have none. Its userfaultfd, unless another thread has taken that.
    Never(Option<Userfaultfd>),
}

impl<S> Default for ExpectedChildren<S> {
    fn default() -> Self {
        ExpectedChildren {
            arrivals: Mutex::default(),
            wake: OnceLock::new(),
            busy: AtomicU64::new(0),
        }
    }
}

impl<S> ExpectedChildren<S> {
    /// A new token.
    pub(crate) fn expect(&self) -> u64 {
        let token = new_token();
        lock(&self.arrivals).insert(token, Arrival::Expected);
        token
    }

    /// No child is expected any more.
    pub(crate) fn forget(&self, token: u64) {
        let mut arrivals = lock(&self.arrivals);
        if let Some(Arrival::Here(uffd)) = arrivals.remove(&token) {
            // A program can hold up the thread that closes it: not the one that serves its parent.
            arrivals.insert(token, Arrival::Over(uffd));
        }
        drop(arrivals);
        self.wake();
    }

    /// The userfaultfd of a child that has said hello, once.
    pub(crate) fn take_here(&self, token: u64) -> Option<Userfaultfd> {
        let mut arrivals = lock(&self.arrivals);
        let arrival = arrivals.get_mut(&token)?;
        match std::mem::replace(arrival, Arrival::Taken) {
            Arrival::Here(uffd) => Some(uffd),
            other => {
                *arrival = other;
                None
            }
        }
    }

    /// A child has its page states. `false` if the thread that admits it has given up.
    pub(crate) fn set_forked(&self, token: u64, child: Arc<S>) -> bool {
        match lock(&self.arrivals).get_mut(&token) {
            Some(arrival @ Arrival::Taken) => *arrival = Arrival::Forked(child),
            _ => return false,
        }
        self.wake();
        true
    }

    fn wake(&self) {
        if let Some(wake) = self.wake.get() {
            wake();
        }
    }

    /// For the thread that admits helpers: what wakes it where [`ExpectedChildren::admission`] may have news.
    #[cfg(not(simulated))]
    pub(crate) fn set_wake(&self, wake: impl Fn() + Send + Sync + 'static) {
        // There is one such thread.
        let _ = self.wake.set(Box::new(wake));
    }

    /// For the thread that admits helpers: a child shows a token, with the userfaultfd that becomes its address space's.
    ///
    /// # Errors
    /// Where there is no such child, or no longer, or it has said so before: the userfaultfd.
    pub(crate) fn arrive(&self, token: u64, uffd: Userfaultfd) -> Result<(), Userfaultfd> {
        match lock(&self.arrivals).get_mut(&token) {
            Some(arrival @ Arrival::Expected) => *arrival = Arrival::Here(uffd),
            _ => return Err(uffd),
        }
        Ok(())
    }

    /// For the thread that admits helpers: what has become of a child that said hello so long ago. It is expected no more
    /// once this is known.
    pub(crate) fn admission(&self, token: u64, waited: Duration) -> Admission<S> {
        let mut arrivals = lock(&self.arrivals);
        let Some(arrival) = arrivals.get(&token) else {
            return Admission::Never(None);
        };
        let is_known = matches!(arrival, Arrival::Forked(_) | Arrival::Over(_));
        if !is_known && waited <= CHILD_PATIENCE {
            return Admission::NotYet;
        }
        match arrivals.remove(&token) {
            Some(Arrival::Forked(child)) => Admission::Forked(child),
            Some(Arrival::Here(uffd) | Arrival::Over(uffd)) => Admission::Never(Some(uffd)),
            _ => Admission::Never(None),
        }
    }

    /// The thread that admits helpers did not listen for so long.
    #[cfg(not(simulated))]
    pub(crate) fn note_busy(&self, busy: Duration) {
        self.busy
            .fetch_add(busy.as_nanos() as u64, Ordering::Relaxed);
    }

    /// For how long the thread that admits helpers has not listened, all in all.
    pub(crate) fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy.load(Ordering::Relaxed))
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

#[cfg(all(test, not(simulated)))]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::sync::atomic::AtomicU32;

    fn uffd() -> Userfaultfd {
        // No call is made by it here.
        OwnedFd::from(std::io::pipe().unwrap().0).into()
    }

    #[test]
    fn a_child_whose_page_states_take_long_delays_no_other() {
        let (expected, woken) = (ExpectedChildren::default(), Arc::new(AtomicU32::new(0)));
        let count = woken.clone();
        expected.set_wake(move || _ = count.fetch_add(1, Ordering::Relaxed));
        let (slow, other, moment) = (expected.expect(), expected.expect(), Duration::ZERO);
        for token in [slow, other] {
            expected.arrive(token, uffd()).unwrap();
            assert!(expected.arrive(token, uffd()).is_err(), "it is here");
            assert!(expected.take_here(token).is_some());
            assert!(expected.arrive(token, uffd()).is_err(), "it was here");
        }
        assert!(expected.set_forked(other, Arc::new(7)));
        assert_eq!(woken.load(Ordering::Relaxed), 1);
        let admission = |token, waited| expected.admission(token, waited);
        assert!(matches!(admission(slow, moment), Admission::NotYet));
        assert!(matches!(admission(other, moment), Admission::Forked(child) if *child == 7));
        let long = CHILD_PATIENCE + Duration::from_millis(1);
        assert!(matches!(admission(slow, long), Admission::Never(None)));
        assert!(!expected.set_forked(slow, Arc::new(8)), "it was given up");
    }

    #[test]
    fn a_child_that_is_not_expected_keeps_its_userfaultfd() {
        let (expected, moment) = (ExpectedChildren::<()>::default(), Duration::ZERO);
        assert!(expected.arrive(TOKEN, uffd()).is_err());
        let token = expected.expect();
        expected.arrive(token, uffd()).unwrap();
        let long = CHILD_PATIENCE + Duration::from_millis(1);
        let never = expected.admission(token, long);
        assert!(matches!(never, Admission::Never(Some(_))));
        let token = expected.expect();
        expected.forget(token);
        let never = expected.admission(token, moment);
        assert!(matches!(never, Admission::Never(None)));
        let token = expected.expect();
        expected.arrive(token, uffd()).unwrap();
        expected.forget(token);
        let never = expected.admission(token, moment);
        assert!(
            matches!(never, Admission::Never(Some(_))),
            "it is for the other thread to close"
        );
    }
}
