//! Threads that do nothing but live: when the supervisor dies, the kernel tells every program's
//! helper through the futexes these threads own, whatever the supervisor died of.

use crate::sync::{Mutex, lock};
use memfold_sys::port::{Port, ROBUST_OFFSET};
use memfold_sys::thread::RobustList;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};

/// Makes channels that are watched.
#[derive(Default)]
pub(crate) struct Sentinel {
    lists: Mutex<Vec<Arc<RobustList>>>,
}

impl Sentinel {
    /// A channel for a new address space.
    pub(crate) fn new_port(&self) -> io::Result<(Port, OwnedFd)> {
        let mut lists = lock(&self.lists);
        for list in lists.iter() {
            match Port::create(list.clone()) {
                Err(error) if error.kind() == io::ErrorKind::QuotaExceeded => {}
                Err(error) => return Err(error),
                created => return created,
            }
        }
        let list = Self::start_thread()?;
        lists.push(list.clone());
        Port::create(list)
    }

    fn start_thread() -> io::Result<Arc<RobustList>> {
        let (sender, receiver) = mpsc::channel();
        std::thread::Builder::new()
            .name("sentinel".into())
            .spawn(move || {
                let list = RobustList::for_current_thread(ROBUST_OFFSET).map(Arc::new);
                // Kept alive here too: the kernel walks the list when this thread dies.
                let kept = list.as_ref().ok().cloned();
                // The receiver waits for exactly this message.
                let _ = sender.send(list);
                if kept.is_some() {
                    loop {
                        std::thread::park();
                    }
                }
            })?;
        receiver
            .recv()
            .map_err(|_| io::Error::other("the sentinel thread ended"))?
    }
}
