//! The control socket: credentials and descriptor passing.

use crate::hello::{Hello, MAGIC, Welcome};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The process at the other end of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its PID in this process's PID namespace; 0 if it has none there.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

/// Listens at `path`, for the user alone (mode 0600).
///
/// # Errors
/// `InvalidInput` if the path is longer than a socket's can be; what the kernel refuses.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let name = path.as_os_str().as_bytes();
    let socket = listen_at(name, |name| SocketAddrUnix::new(name))?;
    let mode = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o600);
    std::fs::set_permissions(path, mode)?;
    Ok(socket)
}

/// Listens at the abstract name made of `path`'s bytes, which programs reach that changed their root or
/// their user. Any process can connect: the caller must check the peer.
///
/// # Errors
/// As [`listen`].
pub fn listen_abstract(path: &Path) -> io::Result<OwnedFd> {
    let name = path.as_os_str().as_bytes();
    listen_at(name, |name| {
        // The length of an abstract name counts. The preload library connects with all of `sun_path`,
        // so the name is padded with zeros to the same length here.
        let mut padded = [0; ABSTRACT_NAME_MAX];
        padded[..name.len()].copy_from_slice(name);
        SocketAddrUnix::new_abstract_name(&padded)
    })
}

/// Bytes of an abstract name: `sun_path` without the zero in front.
const ABSTRACT_NAME_MAX: usize = crate::hello::SOCKET_PATH_MAX - 1;

fn listen_at(
    name: &[u8],
    address: impl FnOnce(&[u8]) -> rustix::io::Result<SocketAddrUnix>,
) -> io::Result<OwnedFd> {
    const BACKLOG: i32 = 1024;
    if name.len() > ABSTRACT_NAME_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "socket path too long",
        ));
    }
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    rustix::net::bind(&socket, &address(name)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Accepts one connection; `None` when there is none.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
        Ok(connection) => Ok(Some(connection)),
        Err(rustix::io::Errno::AGAIN) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// The peer's credentials at its `connect`.
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    // Not by rustix, whose PIDs cannot be 0: that is the PID of a peer that this PID namespace does not show.
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    // SAFETY: `SO_PEERCRED` fills a `ucred`, for which any bytes are a value.
    unsafe { socket_option(socket, libc::SO_PEERCRED, &mut credentials)? };
    Ok(Peer {
        pid: credentials.pid,
        uid: credentials.uid,
    })
}

/// `SO_PEERPIDFD`, which libc lacks.
pub(crate) const SO_PEERPIDFD: i32 = 77;

/// A pidfd of the process that called `connect` for the other end.
///
/// # Errors
/// If that process is reaped, and before Linux 6.5.
pub fn peer_handle(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut handle: i32 = -1;
    // SAFETY: `SO_PEERPIDFD` fills an `i32` with a descriptor made for this call, which nothing else owns.
    unsafe {
        socket_option(socket, SO_PEERPIDFD, &mut handle)?;
        Ok(OwnedFd::from_raw_fd(handle))
    }
}

/// Whether a peer's process can be told from another one of its PID (`SO_PEERPIDFD`, Linux 6.5).
pub fn kernel_hands_out_peers() -> bool {
    let pair = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    );
    pair.is_ok_and(|(end, _)| peer_handle(end.as_fd()).is_ok())
}

/// Whether the other end is still open.
///
/// # Errors
/// What `poll` returns.
pub fn is_connected(socket: BorrowedFd<'_>) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    const NOT_AT_ALL: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
    poll(&mut polled, Some(&NOT_AT_ALL))?;
    let gone = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    Ok(!polled[0].revents().intersects(gone))
}

/// # Safety
/// The option fills at most a `T`, for which any bytes are a value.
unsafe fn socket_option<T>(socket: BorrowedFd<'_>, option: i32, value: &mut T) -> io::Result<()> {
    let mut size = size_of::<T>() as libc::socklen_t;
    let value: *mut T = value;
    // SAFETY: `value` and `size` are live, and `size` is the value's.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            value.cast(),
            &raw mut size,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Descriptors that a message may bring at most; the kernel closes those beyond.
const DESCRIPTORS_MAX: usize = 12;

/// Receives the helper's [`Hello`] and its two userfaultfds (none if it was refused them). Never waits.
///
/// # Errors
/// `UnexpectedEof` if the helper is gone, `InvalidData` if the peer is no memfold helper.
pub fn receive_hello(socket: BorrowedFd<'_>) -> io::Result<(Hello, Vec<OwnedFd>)> {
    let mut hello = Hello::default();
    // SAFETY: `Hello` is plain integers without padding, borrowed here alone: any bytes are a value.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut((&raw mut hello).cast::<u8>(), size_of::<Hello>())
    };
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received =
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if received.bytes != size_of::<Hello>() || hello.magic != MAGIC {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "not a memfold helper",
        ));
    }
    Ok((hello, descriptors))
}

/// Sends a [`Welcome`] with one or two descriptors. Never waits.
///
/// # Panics
/// With more than two descriptors.
pub fn send_welcome(
    socket: BorrowedFd<'_>,
    welcome: &Welcome,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    // SAFETY: `Welcome` is plain integers without padding, borrowed as long as the slice.
    let bytes = unsafe {
        std::slice::from_raw_parts(
            std::ptr::from_ref(welcome).cast::<u8>(),
            size_of::<Welcome>(),
        )
    };
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    assert!(
        control.push(SendAncillaryMessage::ScmRights(descriptors)),
        "the control buffer holds two descriptors"
    );
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn socket() -> OwnedFd {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn name() -> std::path::PathBuf {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        std::env::temp_dir().join(format!("memfold-socket-{}-{count}", std::process::id()))
    }

    /// As the preload library does: with the whole structure.
    fn connect_padded(client: &OwnedFd, name: &[u8]) -> io::Result<()> {
        // SAFETY: zeros are a value; the address is live and of the length passed.
        let result = unsafe {
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as u16;
            for (place, byte) in address.sun_path.iter_mut().zip(name) {
                *place = *byte as libc::c_char;
            }
            let size = size_of::<libc::sockaddr_un>() as libc::socklen_t;
            libc::connect(client.as_raw_fd(), (&raw const address).cast(), size)
        };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    #[test]
    fn both_kinds_of_name_are_reached_with_the_whole_structure() {
        let path = name();
        let plain = listen(&path).unwrap();
        let hidden = listen_abstract(&path).unwrap();
        let bytes = path.as_os_str().as_bytes();
        let abstract_name = [b"\0", bytes].concat();
        for (listener, name) in [(&plain, bytes), (&hidden, &abstract_name)] {
            assert!(accept(listener.as_fd()).unwrap().is_none());
            connect_padded(&socket(), name).unwrap();
            assert!(accept(listener.as_fd()).unwrap().is_some());
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_name_may_be_as_long_as_the_kernel_allows() {
        let longest = "x".repeat(ABSTRACT_NAME_MAX);
        listen_abstract(Path::new(&longest)).unwrap();
        let error = listen_abstract(Path::new(&(longest + "x"))).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn descriptors_arrive_with_hello_and_welcome() {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let flags = SocketFlags::CLOEXEC;
        let (helper, supervisor) = rustix::net::socketpair(family, kind, flags, None).unwrap();
        let nothing = receive_hello(supervisor.as_fd()).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);

        let hello = Hello {
            magic: MAGIC,
            thread: 7,
            ..Hello::default()
        };
        // SAFETY: plain integers.
        let bytes = unsafe {
            std::slice::from_raw_parts((&raw const hello).cast::<u8>(), size_of::<Hello>())
        };
        let sent = [helper.as_fd(), supervisor.as_fd()];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        assert!(control.push(SendAncillaryMessage::ScmRights(&sent)));
        let flags = SendFlags::empty();
        rustix::net::sendmsg(&helper, &[IoSlice::new(bytes)], &mut control, flags).unwrap();
        let (received, descriptors) = receive_hello(supervisor.as_fd()).unwrap();
        assert_eq!((received.magic, received.thread), (MAGIC, 7));
        assert_eq!(descriptors.len(), 2);
        for descriptor in &descriptors {
            let flags = rustix::io::fcntl_getfd(descriptor).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }

        send_welcome(supervisor.as_fd(), &Welcome::default(), &sent).unwrap();
        let answer = receive_hello(helper.as_fd()).unwrap_err();
        assert_eq!(answer.kind(), io::ErrorKind::InvalidData, "no Hello");
        drop((helper, descriptors));
        let end = receive_hello(supervisor.as_fd()).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }
}
