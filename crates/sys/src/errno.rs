/// A kernel error number, as system calls return it (positive here).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl Errno {
    /// Not permitted.
    pub const EPERM: Errno = Errno(1);
    /// Not there: an unmapped or hole page.
    pub const ENOENT: Errno = Errno(2);
    /// No such process: the address space is gone.
    pub const ESRCH: Errno = Errno(3);
    /// No such descriptor.
    pub const EBADF: Errno = Errno(9);
    /// Not now: an event is pending.
    pub const EAGAIN: Errno = Errno(11);
    /// Out of memory.
    pub const ENOMEM: Errno = Errno(12);
    /// Not allowed.
    pub const EACCES: Errno = Errno(13);
    /// Bad address.
    pub const EFAULT: Errno = Errno(14);
    /// Busy: the page is shared or pinned.
    pub const EBUSY: Errno = Errno(16);
    /// Already there.
    pub const EEXIST: Errno = Errno(17);
    /// Not valid here.
    pub const EINVAL: Errno = Errno(22);
    /// Too many open files in all processes.
    pub const ENFILE: Errno = Errno(23);
    /// Too many open files in this process.
    pub const EMFILE: Errno = Errno(24);
    /// Not of this kind of file: a descriptor's number is another file's by now.
    pub const ENOTTY: Errno = Errno(25);
    /// No room: a place of the stage is lost.
    pub const ENOSPC: Errno = Errno(28);
    /// This kind of file does not know how.
    pub const EOPNOTSUPP: Errno = Errno(95);
    /// The wait was too long.
    pub const ETIMEDOUT: Errno = Errno(110);
    /// Not begun: something came in between.
    pub const ECANCELED: Errno = Errno(125);

    /// Splits a raw system call result.
    #[inline]
    pub fn result(value: isize) -> Result<usize, Errno> {
        if (-4095..0).contains(&value) {
            Err(Errno(-value as i32))
        } else {
            Ok(value as usize)
        }
    }
}

/// Whether the error is a want of descriptors, of the process (EMFILE) or of the system (ENFILE).
#[cfg(feature = "std")]
pub fn is_shortage(error: &std::io::Error) -> bool {
    let shortages = [Errno::ENFILE, Errno::EMFILE].map(|errno| Some(errno.0));
    shortages.contains(&error.raw_os_error())
}

#[cfg(feature = "std")]
impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> Self {
        std::io::Error::from_raw_os_error(errno.0)
    }
}

#[cfg(feature = "std")]
impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from(*self).fmt(f)
    }
}

#[cfg(feature = "std")]
impl std::error::Error for Errno {}
