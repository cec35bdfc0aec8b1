//! The control socket: credentials and descriptor passing.

use crate::hello::{Hello, MAGIC, Welcome};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Who is at the other end of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process, as this process's pid namespace numbers it.
    pub pid: i32,
    /// User.
    pub uid: u32,
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Listens at `path`, for the user alone (mode 0600).
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = listen_at(path.as_os_str().as_bytes())?;
    let mode = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o600);
    std::fs::set_permissions(path, mode)?;
    Ok(socket)
}

/// Listens at the abstract name made of `path`'s letters: within reach of programs that changed
/// their root or their user. Whoever accepts must look who it is.
pub fn listen_abstract(path: &Path) -> io::Result<OwnedFd> {
    let mut name = vec![0];
    name.extend(path.as_os_str().as_bytes());
    listen_at(&name)
}

fn listen_at(name: &[u8]) -> io::Result<OwnedFd> {
    // SAFETY: all pointers are to live values of the lengths told; the descriptor is fresh.
    unsafe {
        let fd = check(libc::socket(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
        ))?;
        let socket = OwnedFd::from_raw_fd(fd);
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as u16;
        if name.len() >= address.sun_path.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "socket path too long",
            ));
        }
        for (target, byte) in address.sun_path.iter_mut().zip(name) {
            *target = *byte as libc::c_char;
        }
        // The whole structure counts, so that an abstract name is padded alike on both sides.
        let size = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        check(libc::bind(fd, (&raw const address).cast(), size))?;
        check(libc::listen(fd, 1024))?;
        Ok(socket)
    }
}

/// Accepts one connection; `None` when there is none.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<Option<OwnedFd>> {
    // SAFETY: no address is asked for; the descriptor is fresh.
    unsafe {
        let fd = libc::accept4(
            listener.as_raw_fd(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            libc::SOCK_CLOEXEC,
        );
        match check(fd) {
            Ok(fd) => Ok(Some(OwnedFd::from_raw_fd(fd))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The peer's credentials at its `connect`.
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    // SAFETY: the kernel fills a structure of the size told.
    unsafe {
        let mut credentials: libc::ucred = std::mem::zeroed();
        let mut size = size_of::<libc::ucred>() as libc::socklen_t;
        check(libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &mut size,
        ))?;
        Ok(Peer {
            pid: credentials.pid,
            uid: credentials.uid,
        })
    }
}

/// A pidfd of the process that called `connect` for the other end.
///
/// # Errors
/// If that process is reaped, and before Linux 6.5.
pub fn peer_handle(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: i32 = 77;
    let mut handle: i32 = -1;
    let mut size = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel fills a number of the size told; the descriptor is fresh.
    unsafe {
        check(libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut handle).cast(),
            &mut size,
        ))?;
        Ok(OwnedFd::from_raw_fd(handle))
    }
}

#[repr(align(8))]
struct ControlBuffer([u8; 64]);

/// Receives the helper's [`Hello`] and its two userfaultfds (none if it was refused them).
pub fn receive_hello(socket: BorrowedFd<'_>) -> io::Result<(Hello, Vec<OwnedFd>)> {
    let mut hello = Hello::default();
    let mut control = ControlBuffer([0; 64]);
    let mut vector = libc::iovec {
        iov_base: (&raw mut hello).cast(),
        iov_len: size_of::<Hello>(),
    };
    let mut descriptors = Vec::new();
    // SAFETY: the header points to live buffers of the lengths told; `Hello` is plain integers,
    // so any bytes are valid; received descriptors are fresh and owned from here on.
    let received = unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &mut vector;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = control.0.len();
        let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
        let received = libc::recvmsg(socket.as_raw_fd(), &mut header, flags);
        if received < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut message = libc::CMSG_FIRSTHDR(&header);
        while !message.is_null() {
            if (*message).cmsg_level == libc::SOL_SOCKET && (*message).cmsg_type == libc::SCM_RIGHTS
            {
                let bytes = (*message).cmsg_len - libc::CMSG_LEN(0) as usize;
                let data: *const i32 = libc::CMSG_DATA(message).cast();
                for index in 0..bytes / size_of::<i32>() {
                    descriptors.push(OwnedFd::from_raw_fd(data.add(index).read_unaligned()));
                }
            }
            message = libc::CMSG_NXTHDR(&header, message);
        }
        received as usize
    };
    if received == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if received != size_of::<Hello>() || hello.magic != MAGIC {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "not a memfold helper",
        ));
    }
    Ok((hello, descriptors))
}

/// Sends a [`Welcome`] with one or two descriptors.
pub fn send_welcome(
    socket: BorrowedFd<'_>,
    welcome: &Welcome,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut control = ControlBuffer([0; 64]);
    let mut vector = libc::iovec {
        iov_base: std::ptr::from_ref(welcome).cast_mut().cast(),
        iov_len: size_of::<Welcome>(),
    };
    assert!(
        descriptors.len() <= 2,
        "the control buffer holds two descriptors"
    );
    // SAFETY: as in `receive_hello`; the control buffer has room for the descriptors.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &mut vector;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        let bytes = size_of_val(descriptors) as u32;
        header.msg_controllen = libc::CMSG_SPACE(bytes) as usize;
        let message = libc::CMSG_FIRSTHDR(&header);
        (*message).cmsg_level = libc::SOL_SOCKET;
        (*message).cmsg_type = libc::SCM_RIGHTS;
        (*message).cmsg_len = libc::CMSG_LEN(bytes) as usize;
        let data: *mut i32 = libc::CMSG_DATA(message).cast();
        for (index, descriptor) in descriptors.iter().enumerate() {
            data.add(index)
                .write_unaligned(descriptor.as_fd().as_raw_fd());
        }
        if libc::sendmsg(
            socket.as_raw_fd(),
            &header,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        ) < 0
        {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}
