//! The first words between a program's helper thread and the supervisor.
//!
//! The helper sends one [`Hello`] with its two userfaultfds (a forked child's opens one, and sends it
//! twice); the supervisor answers with one [`Welcome`] with the channel's descriptor (and, for a forked
//! child, the userfaultfd that the kernel made for it). Nothing else is ever sent: afterwards the
//! socket's end of file means to the supervisor that the address space is gone.
//!
//! A program that became another user's may not make a userfaultfd that serves the kernel's own
//! faults. Its helper reports that ([`Hello::refused`]), gets a [`Welcome`] to no address space with
//! [`DEVICE`](crate::uffd::DEVICE), which allows it, and sends another [`Hello`].

use crate::addresses;

/// Spells "memfold1".
pub const MAGIC: u64 = 0x3164_6c6f_666d_656d;

/// What a forked child finds in its beacon instead of its address space's number if part of what
/// it inherited is lost: it must stop.
pub const LOST: u64 = u64::MAX;

/// [`Hello::refused`] of a program that is about to trace others: what is executed from now on must start its helper
/// itself. It has no helper to introduce, and waits until the connection is closed.
pub const TRACES: u64 = u64::MAX;

/// [`Hello::refused`] of a [zygote](crate::zygote), or of a child that it has just forked: neither starts a helper itself. It is
/// looked at from now on, also where programs start theirs, and it waits until the connection is closed.
pub const FORKS_ALONE: u64 = u64::MAX - 1;

/// How the library came into the program into which a thread is sent: the argument of its entry.
pub mod brought {
    /// The supervisor has mapped it.
    pub const BY_SUPERVISOR: u64 = 0;
    /// A loader, and the process executed the program itself.
    pub const BY_LOADER: u64 = 1;
    /// A loader, in the process that this one was forked from.
    pub const BY_FORK: u64 = 2;
    /// The supervisor, in a process that this one was forked from.
    pub const INHERITED: u64 = 3;
    /// The supervisor, which has also led the program's forks into it.
    pub const WITH_FORK_SITES: u64 = 4;
}

/// Where in the library the program's forks are led to: bytes after its entry.
pub const FORK_ENTRY: u64 = 64;

/// What entering the library returns once there is a helper.
pub const READY: u32 = 1;
/// What entering the library returns where the loader has not called it yet.
pub const TOO_EARLY: u32 = 4;

/// Bit of each token by which the child of a prepared fork is recognised, and of no address space's number.
pub const TOKEN: u64 = 1 << 63;

/// Longest socket path, as the kernel has it, terminator included.
pub const SOCKET_PATH_MAX: usize = 108;

/// Pages of the stage: the most that can be on their way out of one program at a time.
pub const STAGE_PAGES: usize = 2048;

/// Pages of the trash, where dropped pages pass through.
pub const TRASH_PAGES: usize = 128;

/// First of the user IDs that helpers with `CAP_SETUID` take: one at random for each helper, so that most
/// likely no other process has it.
pub const FIRST_HELPER_USER: u32 = 1 << 30;

/// How many of them there are.
pub const HELPER_USERS: u32 = 1 << 30;

/// What the preload library's image holds where a [`Rendezvous`] is patched in.
pub const RENDEZVOUS_MARK: [u8; 32] = *b"@memfold-control-socket-path-her";

/// Where the supervisor is, and by what the preload library knows it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rendezvous {
    /// The control socket's path, zero-terminated.
    pub socket_path: [u8; SOCKET_PATH_MAX],
    /// How many seccomp filters the supervisor has.
    pub filters: u32,
    /// The supervisor's user, as its own user namespace numbers it.
    pub user: u32,
    /// Its PID, as its own PID namespace numbers it.
    pub pid: i32,
    /// Its user namespace: the inode of `/proc/self/ns/user`.
    pub user_namespace: u64,
    /// 1 if it may inspect processes of other users (`CAP_SYS_PTRACE`).
    pub inspects_others: u32,
    /// 1 if pages are carried off by `mremap`, as the kernel has no `UFFDIO_MOVE`.
    pub carries: u32,
    /// 1 if programs do without a helper until the supervisor starts one. It changes in the library's file during the run.
    pub starts_late: u32,
}

impl Rendezvous {
    /// As it is patched in: the fields one after the other.
    pub fn to_bytes(&self) -> [u8; PATCHED] {
        let mut bytes = [0; PATCHED];
        let (path, numbers) = bytes.split_at_mut(SOCKET_PATH_MAX);
        path.copy_from_slice(&self.socket_path);
        numbers[..4].copy_from_slice(&self.filters.to_ne_bytes());
        numbers[4..8].copy_from_slice(&self.user.to_ne_bytes());
        numbers[8..12].copy_from_slice(&self.pid.to_ne_bytes());
        numbers[12..20].copy_from_slice(&self.user_namespace.to_ne_bytes());
        numbers[20..24].copy_from_slice(&self.inspects_others.to_ne_bytes());
        numbers[24..28].copy_from_slice(&self.carries.to_ne_bytes());
        numbers[28..].copy_from_slice(&self.starts_late.to_ne_bytes());
        bytes
    }
}

/// Length of what is patched in.
pub const PATCHED: usize = STARTS_LATE_AT + 4;

/// A value of [`Rendezvous::starts_late`], as are the next: programs start their helpers themselves, for now.
pub const STARTS_AT_ONCE: u32 = 0;
/// They do without until one is started in them.
pub const STARTS_LATE: u32 = 1;
/// They start theirs themselves as long as the run lasts, as programs of it trace others.
pub const ALWAYS_STARTS_AT_ONCE: u32 = 2;

/// Where in it [`Rendezvous::starts_late`] is.
pub const STARTS_LATE_AT: usize = SOCKET_PATH_MAX + 28;

/// Finds in a `/proc/PID/status` how many seccomp filters that process has: 0 where the file
/// lacks the line, as in a kernel without them. Byte by byte, as the file can be long, and the
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
    /// The address space that the program inherited by fork, or the token of its fork if that was prepared; 0 if
    /// none.
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
    /// Why there are no userfaultfds: an errno, [`TRACES`], [`FORKS_ALONE`], or 0. No descriptors come with it then.
    pub refused: u64,
    /// 1 if the library can prepare forks.
    pub can_prepare: u64,
}

/// Where the parts of an arena lie, as a [`Hello`] claims and [`Hello::layout`] has checked. Addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// All of it: start and end.
    pub arena: (u64, u64),
    /// The stage.
    pub stage: (u64, u64),
    /// The trash, right behind the stage.
    pub trash: (u64, u64),
    /// The page by which a forked child learns what it inherited: in this arena, or in one that was
    /// inherited.
    pub beacon: u64,
}

impl Hello {
    /// The arena that it claims; none if there can be no such arena. Whatever the numbers are, nothing
    /// overflows, all is page-aligned and in a program's half of the addresses, and no part overlaps
    /// another.
    pub fn layout(&self) -> Option<Layout> {
        const PAGE: u64 = crate::PAGE_SIZE as u64;
        let range = |start: u64, length: u64| {
            let end = start.checked_add(length)?;
            let fits = start >= PAGE && length > 0 && end <= addresses::END;
            let aligned = start.is_multiple_of(PAGE) && length.is_multiple_of(PAGE);
            (fits && aligned).then_some((start, end))
        };
        let within =
            |inner: (u64, u64), outer: (u64, u64)| inner.0 >= outer.0 && inner.1 <= outer.1;
        let arena = range(self.arena, self.arena_length)?;
        let stage = range(self.stage, (STAGE_PAGES as u64) * PAGE)?;
        let trash = range(self.trash, (TRASH_PAGES as u64) * PAGE)?;
        let beacon = range(self.beacon, PAGE)?;
        let apart = beacon.1 <= stage.0 || beacon.0 >= trash.1;
        let sound = self.stage_pages == STAGE_PAGES as u64
            && within(stage, arena)
            && within(trash, arena)
            && trash.0 == stage.1
            && apart;
        sound.then_some(Layout {
            arena,
            stage,
            trash,
            beacon: beacon.0,
        })
    }
}

/// Supervisor to helper.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Welcome {
    /// [`MAGIC`].
    pub magic: u64,
    /// The address space's number, from 1; 0 for a helper that was refused a userfaultfd.
    pub address_space: u64,
    /// 1 if a userfaultfd comes behind the channel's descriptor and replaces the first one.
    pub replaces_uffd: u64,
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    fn sound() -> Hello {
        const PAGE: u64 = crate::PAGE_SIZE as u64;
        let arena = 0x7000_0000_0000;
        let stage = arena + 20 * PAGE;
        let trash = stage + STAGE_PAGES as u64 * PAGE;
        Hello {
            arena,
            arena_length: (20 + STAGE_PAGES + TRASH_PAGES + 1) as u64 * PAGE,
            stage,
            stage_pages: STAGE_PAGES as u64,
            trash,
            beacon: arena + PAGE,
            ..Hello::default()
        }
    }

    #[test]
    fn an_arena_that_cannot_be_is_refused() {
        const PAGE: u64 = crate::PAGE_SIZE as u64;
        let layout = sound().layout().expect("it is sound");
        assert_eq!(layout.stage.1, layout.trash.0);
        let inherited = Hello {
            beacon: 0x6000_0000_0000,
            ..sound()
        };
        assert!(inherited.layout().is_some(), "a beacon elsewhere");
        let wrong: [fn(&mut Hello); 14] = [
            |hello| hello.arena += 1,
            |hello| hello.arena_length = 0,
            |hello| hello.arena_length = u64::MAX - PAGE + 1,
            |hello| hello.arena = addresses::END,
            |hello| hello.stage += PAGE,
            |hello| hello.stage -= 1,
            |hello| hello.stage = !(PAGE - 1),
            |hello| hello.stage_pages += 1,
            |hello| hello.stage_pages = u64::MAX,
            |hello| hello.stage_pages = 0,
            |hello| hello.trash = hello.stage,
            |hello| hello.beacon = hello.stage,
            |hello| hello.beacon = hello.trash + PAGE,
            |hello| hello.beacon = addresses::END,
        ];
        for (index, spoil) in wrong.iter().enumerate() {
            let mut hello = sound();
            spoil(&mut hello);
            assert_eq!(hello.layout(), None, "number {index}");
        }
    }

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
