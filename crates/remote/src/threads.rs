//! The threads of a store.

use std::{io, thread::JoinHandle};

use memfold_sys::signal::block_all;

/// Starts a thread that leaves all signals to the program: a handler could interrupt it while it holds a lock, and a
/// program that blocks a signal, to wait for it, would get it here.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // The new thread inherits the mask.
    let _blocked = block_all();
    std::thread::Builder::new().name(name.to_owned()).spawn(run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testing::blocked_signals;
    use std::sync::mpsc::channel;

    #[test]
    fn signals_are_left_to_the_program() {
        let before = blocked_signals();
        let (send, receive) = channel();
        let thread = spawn("remote", move || send.send(blocked_signals()).unwrap()).unwrap();
        thread.join().unwrap();
        // SIGINT, SIGALRM, SIGTERM and SIGCHLD.
        for signal in [2, 14, 15, 17] {
            assert_eq!(before >> (signal - 1) & 1, 0, "{signal}");
        }
        let of_thread = receive.recv().unwrap();
        for signal in [2, 14, 15, 17] {
            assert_eq!(of_thread >> (signal - 1) & 1, 1, "{signal}");
        }
        assert_eq!(blocked_signals(), before);
    }
}
