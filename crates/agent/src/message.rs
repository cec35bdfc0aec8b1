//! One exchange with the supervisor, with descriptors.

use crate::rendezvous::rendezvous;
use crate::system;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use memfold_sys::Errno;
use memfold_sys::futex;
use memfold_sys::hello::{Hello, MAGIC, Rendezvous, SOCKET_PATH_MAX, Welcome};
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

/// A connection to the supervisor.
pub struct Connection {
    pub socket: i32,
    /// By the abstract name.
    is_by_name: bool,
}

/// Connects to the supervisor: by the socket's path, or where that is out of reach (a program that
/// changed its root) by the abstract name of the same bytes. Any process can take that name once the supervisor
/// is gone, and in other network namespaces, and so may the path be in another root: nothing is sent to
/// a listener that is not the supervisor.
pub fn connect(rendezvous: &Rendezvous) -> Result<Connection, Errno> {
    let path = &rendezvous.socket_path;
    let by_path = connect_to(path, rendezvous).map(|socket| Connection {
        socket,
        is_by_name: false,
    });
    by_path.or_else(|_| {
        let mut name = [0; SOCKET_PATH_MAX];
        for (target, byte) in name.iter_mut().skip(1).zip(path) {
            // Volatile, or the loop becomes a call of the C library, which is not there.
            // SAFETY: a live local byte.
            unsafe { core::ptr::write_volatile(target, *byte) };
        }
        let socket = connect_to(&name, rendezvous)?;
        Ok(Connection {
            socket,
            is_by_name: true,
        })
    })
}

/// Whether the listener is the supervisor: by its user and, where its PID is visible, by that.
fn is_supervisor(socket: i32, rendezvous: &Rendezvous) -> bool {
    /// Of the listener, when it began to listen: PID, user and group, as the asker's namespaces number them.
    const SO_PEERCRED: usize = 17;
    let mut credentials = [0u32; 3];
    let mut length = core::mem::size_of_val(&credentials) as u32;
    // SAFETY: the kernel writes at most that length into a live buffer of integers.
    let asked = unsafe {
        syscall(
            nr::GETSOCKOPT,
            [
                socket as usize,
                SOL_SOCKET as usize,
                SO_PEERCRED,
                credentials.as_mut_ptr() as usize,
                (&raw mut length) as usize,
                0,
            ],
        )
    };
    let [pid, user, _] = credentials;
    // A PID namespace below the supervisor's shows it as 0.
    let is_its_pid = pid == 0 || pid == rendezvous.pid as u32;
    asked == 0 && is_its_pid && expected_user(rendezvous) == Some(user)
}

/// This program is known to be in the supervisor's user namespace, and what it forks: a process with a
/// helper cannot enter another one.
static IN_ITS_NAMESPACE: AtomicBool = AtomicBool::new(false);

/// How this program's user namespace numbers the supervisor's user; none if it does not.
fn expected_user(rendezvous: &Rendezvous) -> Option<u32> {
    if IN_ITS_NAMESPACE.load(Ordering::Relaxed) {
        return Some(rendezvous.user);
    }
    match system::own_user_namespace() {
        // Without `/proc` that is unknown, and numbers mean what they mean in the first.
        Err(_) => Some(rendezvous.user),
        Ok(own) if own == rendezvous.user_namespace => {
            IN_ITS_NAMESPACE.store(true, Ordering::Relaxed);
            Some(rendezvous.user)
        }
        Ok(_) => {
            let mut map = UserMap::default();
            let outside = rendezvous.user;
            let read = system::read_file(c"/proc/self/uid_map", |part| map.look(part, outside));
            read.ok().and(map.inside)
        }
    }
}

/// Finds in a `/proc/PID/uid_map` what a user of the namespace above is in this one. Each line has three
/// numbers: the first user here, the first there, and how many.
#[derive(Default)]
struct UserMap {
    numbers: [u64; 3],
    /// Numbers of this line that have begun.
    begun: usize,
    in_number: bool,
    inside: Option<u32>,
}

impl UserMap {
    fn look(&mut self, bytes: &[u8], outside: u32) {
        for byte in bytes {
            if byte.is_ascii_digit() {
                if !self.in_number {
                    self.in_number = true;
                    self.begun += 1;
                }
                if let Some(number) = self.numbers.get_mut(self.begun.wrapping_sub(1)) {
                    *number = number.wrapping_mul(10).wrapping_add(u64::from(byte - b'0'));
                }
                continue;
            }
            self.in_number = false;
            if *byte == b'\n' {
                let [here, there, count] = self.numbers;
                let offset = u64::from(outside).wrapping_sub(there);
                if self.begun == 3 && offset < count {
                    self.inside = Some(here.wrapping_add(offset) as u32);
                }
                self.numbers = [0; 3];
                self.begun = 0;
            }
        }
    }
}

fn connect_to(path: &[u8; SOCKET_PATH_MAX], rendezvous: &Rendezvous) -> Result<i32, Errno> {
    let address = SocketAddress {
        family: AF_UNIX,
        path: *path,
    };
    // SAFETY: numbers, then a live address of that length.
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
        let refused = match connected {
            Ok(_) if is_supervisor(fd as i32, rendezvous) => None,
            Ok(_) => Some(Errno::EACCES),
            Err(errno) => Some(errno),
        };
        if let Some(errno) = refused {
            syscall(nr::CLOSE, [fd, 0, 0, 0, 0, 0]);
            return Err(errno);
        }
        Ok(fd as i32)
    }
}

/// Sends a plain structure and descriptors (none or two). By the abstract name descriptors are refused until the supervisor
/// knows the process (`SO_PASSRIGHTS`): that is tried again, for as long as the supervisor waits for a hello.
pub fn send<T: Copy>(
    connection: &Connection,
    value: &T,
    descriptors: Option<[i32; 2]>,
) -> Result<(), Errno> {
    const LONGEST_NS: u64 = 30_000_000_000;
    /// A longer one has the program begin later; many programs that begin at once need the CPUs for something else.
    const LONGEST_PAUSE_NS: u64 = 16_000_000;
    let (mut pause_ns, mut waited_ns) = (500_000, 0);
    loop {
        let sent = send_once(connection.socket, value, descriptors);
        let is_early = sent == Err(Errno::EPERM) && connection.is_by_name && descriptors.is_some();
        if !is_early || waited_ns >= LONGEST_NS {
            return sent;
        }
        // No other thread wakes it.
        let _ = futex::wait(&AtomicU32::new(0), 0, Some(pause_ns));
        waited_ns += pause_ns;
        pause_ns = (2 * pause_ns).min(LONGEST_PAUSE_NS);
    }
}

fn send_once<T: Copy>(socket: i32, value: &T, descriptors: Option<[i32; 2]>) -> Result<(), Errno> {
    let mut vector = IoVector {
        base: core::ptr::from_ref::<T>(value) as usize,
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
        vector: &raw mut vector,
        vector_length: 1,
        control: &raw mut control,
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
        base: core::ptr::from_mut::<T>(value) as usize,
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
        vector: &raw mut vector,
        vector_length: 1,
        control: &raw mut control,
        control_length: core::mem::size_of::<Control>(),
        flags: 0,
    };
    // SAFETY: the kernel writes at most those lengths into live buffers of plain integers.
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

/// Tells the supervisor something ([`Hello::refused`]), and waits until it has taken note.
pub fn tell(what: u64) {
    let Ok(connection) = connect(&rendezvous()) else {
        return;
    };
    let hello = Hello {
        magic: MAGIC,
        refused: what,
        ..Hello::default()
    };
    if send(&connection, &hello, None).is_ok() {
        // Nothing comes: it hangs up.
        let _ = receive(connection.socket, &mut Welcome::default());
    }
    system::close(connection.socket);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inside(map: &str, outside: u32, part: usize) -> Option<u32> {
        let mut users = UserMap::default();
        map.as_bytes()
            .chunks(part)
            .for_each(|part| users.look(part, outside));
        users.inside
    }

    #[test]
    fn users_are_found_in_a_map() {
        let all = "         0          0 4294967295\n";
        let rootless = "0 1000 1\n         1     100000      65536\n";
        for part in [1, 5, 512] {
            assert_eq!(inside(all, 1000, part), Some(1000));
            assert_eq!(inside(rootless, 1000, part), Some(0));
            assert_eq!(inside(rootless, 100_004, part), Some(5));
            assert_eq!(inside(rootless, 165_536, part), None);
            assert_eq!(inside(rootless, 0, part), None);
            assert_eq!(inside("", 0, part), None);
            assert_eq!(inside("1 2\n1 2 3 4\n", 2, part), None);
        }
    }
}
