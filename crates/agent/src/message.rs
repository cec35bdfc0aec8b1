//! One exchange with the supervisor, with descriptors.

use memfold_sys::Errno;
use memfold_sys::hello::SOCKET_PATH_MAX;
use memfold_sys::raw::{nr, syscall};

const AF_UNIX: u16 = 1;
const SOCK_SEQPACKET_CLOEXEC: usize = 5 | 0o2_000_000;
const SOL_SOCKET: i32 = 1;
const SCM_RIGHTS: i32 = 1;
const MSG_NOSIGNAL: usize = 0x4000;
const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;

#[repr(C)]
struct SocketAddress {
    family: u16,
    path: [u8; SOCKET_PATH_MAX],
}

#[repr(C)]
struct IoVector {
    base: usize,
    length: usize,
}

#[repr(C)]
struct MessageHeader {
    name: usize,
    name_length: u32,
    vector: *mut IoVector,
    vector_length: usize,
    control: *mut Control,
    control_length: usize,
    flags: i32,
}

/// A control message with up to two descriptors.
#[repr(C, align(8))]
struct Control {
    length: usize,
    level: i32,
    kind: i32,
    descriptors: [i32; 2],
}

const CONTROL_HEADER: usize = 16;

/// Connects to the supervisor: by the socket's path, or where that is out of reach (a program that
/// changed its root or its user) by the abstract name of the same letters.
pub fn connect(path: &[u8; SOCKET_PATH_MAX]) -> Result<i32, Errno> {
    connect_to(path).or_else(|_| {
        let mut name = [0; SOCKET_PATH_MAX];
        for (target, byte) in name.iter_mut().skip(1).zip(path) {
            // Volatile, or the loop becomes a call of the C library, which is not there.
            // SAFETY: a live local byte.
            unsafe { core::ptr::write_volatile(target, *byte) };
        }
        connect_to(&name)
    })
}

fn connect_to(path: &[u8; SOCKET_PATH_MAX]) -> Result<i32, Errno> {
    let address = SocketAddress {
        family: AF_UNIX,
        path: *path,
    };
    // SAFETY: numbers, then a live address of the length told.
    unsafe {
        let fd = Errno::result(syscall(
            nr::SOCKET,
            [AF_UNIX as usize, SOCK_SEQPACKET_CLOEXEC, 0, 0, 0, 0],
        ))?;
        let size = core::mem::size_of::<SocketAddress>();
        let connected = Errno::result(syscall(
            nr::CONNECT,
            [fd, &raw const address as usize, size, 0, 0, 0],
        ));
        if let Err(errno) = connected {
            syscall(nr::CLOSE, [fd, 0, 0, 0, 0, 0]);
            return Err(errno);
        }
        Ok(fd as i32)
    }
}

/// Sends a plain structure and descriptors (none or two).
pub fn send<T: Copy>(socket: i32, value: &T, descriptors: Option<[i32; 2]>) -> Result<(), Errno> {
    let mut vector = IoVector {
        base: value as *const T as usize,
        length: core::mem::size_of::<T>(),
    };
    let mut control = Control {
        length: CONTROL_HEADER + 8,
        level: SOL_SOCKET,
        kind: SCM_RIGHTS,
        descriptors: descriptors.unwrap_or_default(),
    };
    let header = MessageHeader {
        name: 0,
        name_length: 0,
        vector: &mut vector,
        vector_length: 1,
        control: &mut control,
        control_length: if descriptors.is_some() {
            CONTROL_HEADER + 8
        } else {
            0
        },
        flags: 0,
    };
    // SAFETY: the header and what it points to are live; the kernel only reads them.
    let sent = unsafe {
        syscall(
            nr::SENDMSG,
            [
                socket as usize,
                &raw const header as usize,
                MSG_NOSIGNAL,
                0,
                0,
                0,
            ],
        )
    };
    Errno::result(sent).map(|_| ())
}

/// Receives a plain structure of integers and up to two descriptors (-1 where none came).
pub fn receive<T: Copy>(socket: i32, value: &mut T) -> Result<[i32; 2], Errno> {
    let expected = core::mem::size_of::<T>();
    let mut vector = IoVector {
        base: value as *mut T as usize,
        length: expected,
    };
    let mut control = Control {
        length: 0,
        level: 0,
        kind: 0,
        descriptors: [-1, -1],
    };
    let mut header = MessageHeader {
        name: 0,
        name_length: 0,
        vector: &mut vector,
        vector_length: 1,
        control: &mut control,
        control_length: core::mem::size_of::<Control>(),
        flags: 0,
    };
    // SAFETY: the kernel writes at most the lengths told into live buffers of plain integers.
    let received = unsafe {
        syscall(
            nr::RECVMSG,
            [
                socket as usize,
                &raw mut header as usize,
                MSG_CMSG_CLOEXEC,
                0,
                0,
                0,
            ],
        )
    };
    if Errno::result(received)? != expected {
        return Err(Errno::EINVAL);
    }
    if control.length == CONTROL_HEADER + 4 {
        control.descriptors[1] = -1;
    }
    Ok(control.descriptors)
}
