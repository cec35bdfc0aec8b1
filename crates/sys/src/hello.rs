//! The first words between a program's helper thread and the supervisor.
//!
//! The helper sends one [`Hello`] with its two userfaultfds (a forked child's opens one, and sends it
//! twice); the supervisor answers with one [`Welcome`] with the channel's descriptor (and, for a forked
//! child, the userfaultfd that the kernel made for it). Nothing else is ever sent: afterwards the
//! socket's end of file tells the supervisor that the address space is gone.
//!
//! A program that became another user's may not make a userfaultfd that serves the kernel's own
//! faults. Its helper says so ([`Hello::refused`]), gets a [`Welcome`] to no address space with
//! [`DEVICE`](crate::uffd::DEVICE), which lets it, and says hello again.

/// Spells "memfold1".
pub const MAGIC: u64 = 0x3164_6c6f_666d_656d;

/// What a forked child finds in its beacon instead of its address space's number if part of what
/// it inherited is lost: it must stop.
pub const LOST: u64 = u64::MAX;

/// Longest socket path, as the kernel has it, terminator included.
pub const SOCKET_PATH_MAX: usize = 108;

/// What the preload library's image holds where the socket's path is patched in, and behind that the
/// number of filters on the supervisor's own system calls, a [`u32`].
pub const SOCKET_PATH_MARK: [u8; 32] = *b"@memfold-control-socket-path-her";

/// Length of what is patched in.
pub const PATCHED: usize = SOCKET_PATH_MAX + core::mem::size_of::<u32>();

/// Finds in a `/proc/PID/status` how many filters the system calls of that process pass: 0 where the
/// file does not say, as in a kernel without filters. Byte by byte, as the file can be long, and the
/// preload library has nothing to compare strings with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filters {
    /// So much of the line is right so far; `None` in another one.
    matched: Option<usize>,
    started: bool,
    /// The number.
    pub count: u32,
}

impl Filters {
    const LINE: &[u8] = b"Seccomp_filters:";

    /// Looks at what comes next in the file.
    pub fn look(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let at_start = !core::mem::replace(&mut self.started, true);
            let matched = if at_start { Some(0) } else { self.matched };
            self.matched = match matched {
                _ if *byte == b'\n' => Some(0),
                Some(at) if at < Self::LINE.len() => (Self::LINE[at] == *byte).then_some(at + 1),
                Some(at) => {
                    if byte.is_ascii_digit() {
                        self.count = self
                            .count
                            .wrapping_mul(10)
                            .wrapping_add(u32::from(byte - b'0'));
                    }
                    Some(at)
                }
                None => None,
            };
        }
    }
}

/// Helper to supervisor. Addresses are of the program.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: u64,
    /// The address space that the program inherited by fork; 0 if none.
    pub inherited: u64,
    /// The helper's own mapping (guards, stack, stage, trash): never managed.
    pub arena: u64,
    /// Its length in bytes.
    pub arena_length: u64,
    /// First page of the stage.
    pub stage: u64,
    /// Pages of the stage.
    pub stage_pages: u64,
    /// First page of the trash, where dropped pages pass through.
    pub trash: u64,
    /// The page by which a forked child learns what it inherited.
    pub beacon: u64,
    /// The address space of the process that forked this one, where nothing is inherited by way of
    /// the supervisor; 0 if it was executed.
    pub relative: u64,
    /// The helper's number, as it knows itself.
    pub thread: u64,
    /// Why there are no userfaultfds: an errno, or 0. No descriptors come with it then.
    pub refused: u64,
}

/// Supervisor to helper.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: u64,
    /// The address space's number, from 1; 0 for who was refused a userfaultfd.
    pub address_space: u64,
    /// 1 if a userfaultfd comes behind the channel's descriptor and replaces the first one.
    pub replaces_uffd: u64,
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    #[test]
    fn filters_are_counted() {
        let count = |text: &str, part: usize| {
            let mut filters = Filters::default();
            text.as_bytes()
                .chunks(part)
                .for_each(|part| filters.look(part));
            filters.count
        };
        for part in [1, 7, 4096] {
            let text = "Name:\tSeccomp_filters:4\nSeccomp:\t2\nSeccomp_filters:\t12\nX:\t3\n";
            assert_eq!(count(text, part), 12);
            assert_eq!(count("Seccomp_filters:\t3", part), 3);
            assert_eq!(count("Name:\tx\nSeccomp:\t2\n", part), 0);
        }
    }
}
