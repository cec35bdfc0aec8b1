//! A fault handler that one program holds up, and the thread that stands in for it.
//!
//! A program that keeps changing its mappings is read from until it pauses, with its gate held, and other
//! handlers wait for that gate. Other programs whose faults come from the same CPU must not wait as well, so
//! a thread that takes the handler's place starts where the wait is long, and ends once the handler is back.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long one program may hold up a handler before another thread stands in. Shorter starts threads for
/// waits that end by themselves; longer adds to the worst fault of other programs.
pub const PATIENCE: Duration = Duration::from_millis(2);

/// How long a stand-in listens before it looks whether the handler is back.
pub const LISTEN: Duration = Duration::from_millis(20);

/// Set once the handler is back: its stand-in ends.
pub type Back = Arc<AtomicBool>;

struct StandIn {
    start: Box<dyn Fn(Back)>,
    running: Option<Back>,
}

thread_local! {
    static STAND_IN: RefCell<Option<StandIn>> = const { RefCell::new(None) };
}

/// Makes the calling thread one for which `start` starts a stand-in.
pub fn provide(start: impl Fn(Back) + 'static) {
    let start = Box::new(start);
    let running = None;
    STAND_IN.with(|own| *own.borrow_mut() = Some(StandIn { start, running }));
}

/// The calling thread has waited for one program for more than [`PATIENCE`]. Starts its stand-in, if it is a
/// handler and has none.
pub fn held_up() {
    STAND_IN.with(|own| {
        if let Some(own) = &mut *own.borrow_mut()
            && own.running.is_none()
        {
            let back = Back::default();
            (own.start)(back.clone());
            own.running = Some(back);
        }
    });
}

/// The calling thread is done with that program.
pub fn is_back() {
    STAND_IN.with(|own| {
        if let Some(back) = own.borrow_mut().as_mut().and_then(|own| own.running.take()) {
            back.store(true, Ordering::Relaxed);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::rc::Rc;

    #[test]
    fn one_stand_in_runs_until_the_handler_is_back() {
        held_up();
        let started: Rc<RefCell<Vec<Back>>> = Rc::default();
        let noted = started.clone();
        provide(move |back| noted.borrow_mut().push(back));
        held_up();
        held_up();
        let is_back_at = |index: usize| started.borrow()[index].load(Ordering::Relaxed);
        assert_eq!(started.borrow().len(), 1);
        assert!(!is_back_at(0));
        is_back();
        is_back();
        assert!(is_back_at(0));
        held_up();
        assert_eq!(started.borrow().len(), 2);
        assert!(!is_back_at(1));
    }

    #[test]
    fn threads_that_are_no_handlers_have_none() {
        let started = Rc::new(Cell::new(0));
        let count = started.clone();
        provide(move |_| count.set(count.get() + 1));
        std::thread::spawn(|| {
            held_up();
            is_back();
        })
        .join()
        .unwrap();
        assert_eq!(started.get(), 0);
    }
}
