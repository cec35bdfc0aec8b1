//! The control socket: credentials and descriptor passing.

use crate::hello::{Hello, MAGIC, Welcome};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType,
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
    let socket = unbound()?;
    listen_at(&socket, name, |name| SocketAddrUnix::new(name))?;
    let mode = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o600);
    std::fs::set_permissions(path, mode)?;
    Ok(socket)
}

/// Listens at the abstract name made of `path`'s bytes, which programs reach that changed their root or
/// their user. Any process can connect: the caller must check the peer, and then has its descriptors let through
/// ([`let_descriptors_through`]).
///
/// # Errors
/// As [`listen`].
pub fn listen_abstract(path: &Path) -> io::Result<OwnedFd> {
    let name = path.as_os_str().as_bytes();
    let socket = unbound()?;
    // Before Linux 6.16 there is no such option.
    let _ = set_option(socket.as_fd(), SO_PASSRIGHTS, 0);
    listen_at(&socket, name, |name| {
        // The length of an abstract name counts. The preload library connects with all of `sun_path`,
        // so the name is padded with zeros to the same length here.
        let mut padded = [0; ABSTRACT_NAME_MAX];
        padded[..name.len()].copy_from_slice(name);
        SocketAddrUnix::new_abstract_name(&padded)
    })?;
    Ok(socket)
}

/// Bytes of an abstract name: `sun_path` without the zero in front.
const ABSTRACT_NAME_MAX: usize = crate::hello::SOCKET_PATH_MAX - 1;

fn unbound() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(family, kind, flags, None)?)
}

fn listen_at(
    socket: &OwnedFd,
    name: &[u8],
    address: impl FnOnce(&[u8]) -> rustix::io::Result<SocketAddrUnix>,
) -> io::Result<()> {
    const BACKLOG: i32 = 1024;
    if name.len() > ABSTRACT_NAME_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "socket path too long",
        ));
    }
    rustix::net::bind(socket, &address(name)?)?;
    rustix::net::listen(socket, BACKLOG)?;
    Ok(())
}

/// Has the kernel refuse further connections to a listener, which keeps its name. Those that wait can still be accepted.
///
/// # Errors
/// What the kernel refuses.
pub fn stop_listening(listener: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::net::shutdown(listener, Shutdown::Read)?)
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

/// `SO_PASSRIGHTS`, which libc lacks.
pub(crate) const SO_PASSRIGHTS: i32 = 83;

fn set_option(socket: BorrowedFd<'_>, option: i32, value: i32) -> io::Result<()> {
    let size = size_of::<i32>() as libc::socklen_t;
    let value: *const i32 = &raw const value;
    // SAFETY: `value` is live, and the kernel reads as much of it as its size.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            value.cast(),
            size,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Lets a peer send descriptors, which got `EPERM` so far. (Before Linux 6.16 it always can.)
pub fn let_descriptors_through(socket: BorrowedFd<'_>) {
    // Fails where there is no such option.
    let _ = set_option(socket, SO_PASSRIGHTS, 1);
}

/// Whether the kernel can keep descriptors from being sent to a socket (`SO_PASSRIGHTS`, Linux 6.16).
pub fn kernel_withholds_descriptors() -> bool {
    unbound().is_ok_and(|socket| set_option(socket.as_fd(), SO_PASSRIGHTS, 0).is_ok())
}

/// Descriptors of a [`Hello`].
const DESCRIPTORS_MAX: usize = 2;

/// Reads the helper's [`Hello`] and its two userfaultfds (none if it was refused them) without taking them out of the
/// socket. Never waits, and closes nothing: to close what a peer sent may take any time, so the descriptors come with an
/// error, too, and those for which there is no room stay in the socket.
///
/// The first result fails with `UnexpectedEof` if the helper is gone, with `InvalidData` if the peer is no memfold helper,
/// with `EMFILE` if this process has no descriptors left for those that were sent.
pub fn peek_hello(socket: BorrowedFd<'_>) -> (io::Result<Hello>, Vec<OwnedFd>) {
    let mut hello = Hello::default();
    // SAFETY: `Hello` is plain integers without padding, borrowed here alone: any bytes are a value.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut((&raw mut hello).cast::<u8>(), size_of::<Hello>())
    };
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received =
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Ok(received) => received,
            Err(errno) => return (Err(errno.into()), Vec::new()),
        };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let invalid = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    let hello = if received.bytes == 0 {
        Err(io::ErrorKind::UnexpectedEof.into())
    } else if received.bytes != size_of::<Hello>() || hello.magic != MAGIC {
        invalid("not a memfold helper")
    } else if received.flags.contains(ReturnFlags::CTRUNC)
        && descriptors.len() < DESCRIPTORS_MAX
        && let Err(shortage) = socket.try_clone_to_owned()
    {
        // There was room for their numbers. (A security module may refuse one, too, which does not pass.)
        Err(shortage)
    } else if received.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > DESCRIPTORS_MAX {
        invalid("it sent other descriptors than a helper sends")
    } else {
        Ok(hello)
    };
    (hello, descriptors)
}

/// Takes the message out of the socket that [`peek_hello`] read. As long as the caller has its descriptors, this closes none.
///
/// # Errors
/// What the kernel refuses.
pub fn take_hello(socket: BorrowedFd<'_>) -> io::Result<()> {
    rustix::net::recv(socket, &mut [0; 1], RecvFlags::DONTWAIT)?;
    Ok(())
}

/// What comes next out of a socket.
enum Unread {
    /// Nothing any more.
    End,
    Data,
    /// A message with descriptors.
    Descriptors,
}

/// The next message, which is dropped unless the flags say `MSG_PEEK`. The socket must have `SO_PASSCRED`: by the
/// credentials an empty message differs from the end, and they take all room for descriptors.
fn next_unread(socket: BorrowedFd<'_>, flags: i32) -> io::Result<Unread> {
    /// Room for the sender's credentials alone.
    #[repr(C, align(8))]
    struct Room([u8; 32]);
    // SAFETY: a computation.
    const { assert!(unsafe { libc::CMSG_SPACE(size_of::<libc::ucred>() as u32) } == 32) };
    let mut room = Room([0; 32]);
    // SAFETY: plain integers and pointers, for which zeros are a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_control = (&raw mut room.0).cast();
    header.msg_controllen = size_of::<Room>() as _;
    let flags = flags | libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header and the room that it names are live; it has no room for data.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        return Ok(Unread::Descriptors);
    }
    match header.msg_controllen {
        0 => Ok(Unread::End),
        _ => Ok(Unread::Data),
    }
}

/// Hangs up, and drops what the peer sent, but no descriptors. Returns whether nothing is left: then to close the connection
/// closes nothing that the peer sent.
pub fn hang_up(socket: BorrowedFd<'_>) -> bool {
    /// A helper leaves one or two. A stranger can leave as many as fit into its send buffer.
    const MESSAGES_MAX: usize = 8;
    let hung_up = rustix::net::shutdown(socket, Shutdown::Both);
    if hung_up.is_err() || set_option(socket, libc::SO_PASSCRED, 1).is_err() {
        return false;
    }
    for _ in 0..MESSAGES_MAX {
        match next_unread(socket, libc::MSG_PEEK) {
            Ok(Unread::End) => return true,
            Ok(Unread::Descriptors) => return false,
            Ok(Unread::Data) => {
                let _ = next_unread(socket, 0);
            }
            // That the peer has left messages unread is said once, before those from it.
            Err(_) => {}
        }
    }
    false
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

    fn pair() -> (OwnedFd, OwnedFd) {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn send(socket: &OwnedFd, bytes: &[u8], sent: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        if !sent.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(sent)));
        }
        let flags = SendFlags::NOSIGNAL;
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(|_| ())
    }

    fn bytes_of(hello: &Hello) -> &[u8] {
        // SAFETY: plain integers without padding, borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(hello).cast(), size_of::<Hello>()) }
    }

    #[test]
    fn descriptors_arrive_with_hello_and_welcome() {
        let (helper, supervisor) = pair();
        let (nothing, _) = peek_hello(supervisor.as_fd());
        assert_eq!(nothing.unwrap_err().kind(), io::ErrorKind::WouldBlock);

        let hello = Hello {
            magic: MAGIC,
            thread: 7,
            ..Hello::default()
        };
        let sent = [helper.as_fd(), supervisor.as_fd()];
        send(&helper, bytes_of(&hello), &sent).unwrap();
        let (received, descriptors) = peek_hello(supervisor.as_fd());
        let received = received.unwrap();
        assert_eq!((received.magic, received.thread), (MAGIC, 7));
        assert_eq!(descriptors.len(), 2);
        for descriptor in &descriptors {
            let flags = rustix::io::fcntl_getfd(descriptor).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
        take_hello(supervisor.as_fd()).unwrap();
        let (nothing, _) = peek_hello(supervisor.as_fd());
        assert_eq!(nothing.unwrap_err().kind(), io::ErrorKind::WouldBlock);

        send_welcome(supervisor.as_fd(), &Welcome::default(), &sent).unwrap();
        let (answer, of_answer) = peek_hello(helper.as_fd());
        let kind = answer.unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::InvalidData, "no Hello");
        assert_eq!(of_answer.len(), 2, "they are the caller's all the same");
        // Or the socket would hold itself.
        take_hello(helper.as_fd()).unwrap();
        drop((helper, descriptors, of_answer));
        let (end, _) = peek_hello(supervisor.as_fd());
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn more_descriptors_than_a_hello_has_stay_in_the_socket() {
        let ((helper, supervisor), (mut reader, writer)) = (pair(), std::io::pipe().unwrap());
        let hello = Hello {
            magic: MAGIC,
            ..Hello::default()
        };
        let one = supervisor.as_fd();
        send(&helper, bytes_of(&hello), &[one, one, writer.as_fd()]).unwrap();
        drop(writer);
        let (refused, descriptors) = peek_hello(supervisor.as_fd());
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(descriptors);
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        let open = io::Read::read(&mut reader, &mut [0]).unwrap_err();
        assert_eq!(open.kind(), io::ErrorKind::WouldBlock, "it was closed");
    }

    #[test]
    fn what_is_unread_is_dropped_unless_it_holds_descriptors() {
        type Message = (&'static [u8], bool);
        let queues: [&[Message]; 6] = [
            &[],
            &[(b"data", false), (b"", false)],
            &[(b"", true)],
            &[(b"data", false), (b"", false), (b"x", true)],
            &[(b"x", true), (b"data", false)],
            &[(b"".as_slice(), false); 4],
        ];
        for (queue, is_open) in queues.iter().flat_map(|one| [(one, true), (one, false)]) {
            let (helper, supervisor) = pair();
            // Which the other end is told of, if that closes first.
            send(&supervisor, b"unread", &[]).unwrap();
            for (data, has_descriptor) in *queue {
                let sent = [supervisor.as_fd()];
                send(&helper, data, &sent[..usize::from(*has_descriptor)]).unwrap();
            }
            let helper = is_open.then_some(helper);
            let is_empty = hang_up(supervisor.as_fd());
            assert_eq!(is_empty, !queue.iter().any(|(_, has)| *has), "{queue:?}");
            if let Some(helper) = helper {
                let late = send(&helper, b"late", &[supervisor.as_fd()]);
                assert_eq!(late, Err(rustix::io::Errno::PIPE));
                let mut byte = [0; 8];
                rustix::io::read(&helper, &mut byte).unwrap();
                let end = rustix::io::read(&helper, &mut byte);
                assert_eq!(end, Ok(0), "it is not left waiting");
            }
        }
    }

    #[test]
    fn strangers_can_send_no_descriptors() {
        if !kernel_withholds_descriptors() {
            return;
        }
        let path = name();
        let listener = listen_abstract(&path).unwrap();
        let abstract_name = [b"\0", path.as_os_str().as_bytes()].concat();
        let client = socket();
        connect_padded(&client, &abstract_name).unwrap();
        let sent = [client.as_fd()];
        let refused = Err(rustix::io::Errno::PERM);
        assert_eq!(send(&client, b"x", &sent), refused, "before it is accepted");
        let connection = accept(listener.as_fd()).unwrap().unwrap();
        assert_eq!(send(&client, b"x", &sent), refused);
        let_descriptors_through(connection.as_fd());
        send(&client, b"x", &sent).unwrap();
        assert!(!hang_up(connection.as_fd()));
        stop_listening(listener.as_fd()).unwrap();
        let other = connect_padded(&socket(), &abstract_name).unwrap_err();
        assert_eq!(other.kind(), io::ErrorKind::ConnectionRefused);
        assert!(accept(listener.as_fd()).unwrap().is_none());
    }
}
