//! Writes to what memfold shares with programs, which may have set it to not block (`O_NONBLOCK`).

use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;

/// Writes all of it, and waits where a pipe or a terminal takes no more for now.
///
/// # Errors
///
/// As `write_all`, but for `WouldBlock`.
pub fn write_all(to: &mut (impl Write + AsFd), mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                // An interruption only means to look sooner.
                let _ = poll(&mut [PollFd::new(&*to, PollFlags::OUT)], None);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    use std::io::Read;

    #[test]
    fn a_full_pipe_that_does_not_block_is_waited_for() {
        let (mut reading, mut writing) = io::pipe().expect("a pipe");
        let flags = fcntl_getfl(&writing).expect("its flags") | OFlags::NONBLOCK;
        fcntl_setfl(&writing, flags).expect("flags");
        let bytes: Vec<u8> = (0..1_000_000_u32).map(|number| number as u8).collect();
        let mut read = vec![0; bytes.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| reading.read_exact(&mut read).expect("all of it"));
            write_all(&mut writing, &bytes).expect("all of it");
        });
        assert!(read == bytes);
    }
}
