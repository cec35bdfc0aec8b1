//! Block devices in user space: the kernel's ublk driver.
//!
//! A [`Device`] is added, given its parameters and started; each of its [`Queue`]s hands requests to one
//! thread over an `io_uring`. The kernel copies the data of a request between its pages and the buffer of the
//! request's tag, so that a request borrows nothing of the kernel's.

use io_uring::{IoUring, cqueue, opcode, squeue, types::Fd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of a sector, whatever the device's blocks are.
const SECTOR: u64 = 512;
/// Places that the driver keeps for each queue in its mapping.
const MOST_DEPTH: usize = 4096;
/// Bytes of the mapping of a queue of most depth start at multiples of this.
const QUEUE_STRIDE: usize = MOST_DEPTH * size_of::<Description>();
const CONTROL: &str = "/dev/ublk-control";

/// An ioctl number of the driver that reads and writes `bytes`.
const fn command(number: u32, bytes: usize) -> u32 {
    const READ_WRITE: u32 = 3;
    READ_WRITE << 30 | (bytes as u32) << 16 | (b'u' as u32) << 8 | number
}

const ADD: u32 = command(0x04, size_of::<ControlCommand>());
const DELETE: u32 = command(0x05, size_of::<ControlCommand>());
const START: u32 = command(0x06, size_of::<ControlCommand>());
const STOP: u32 = command(0x07, size_of::<ControlCommand>());
const SET_PARAMETERS: u32 = command(0x08, size_of::<ControlCommand>());
const FETCH: u32 = command(0x20, size_of::<IoCommand>());
const COMMIT_AND_FETCH: u32 = command(0x21, size_of::<IoCommand>());

/// A command about a device.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ControlCommand {
    device: u32,
    queue: u16,
    length: u16,
    address: u64,
    data: [u64; 2],
}

/// What a device is made of.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct DeviceInfo {
    queues: u16,
    depth: u16,
    state: u16,
    pad: u16,
    buffer_bytes: u32,
    device: u32,
    pid: i32,
    pad2: u32,
    flags: u64,
    server_flags: u64,
    reserved: [u64; 3],
}

/// What the block layer is told.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Parameters {
    length: u32,
    types: u32,
    attributes: u32,
    logical_shift: u8,
    physical_shift: u8,
    optimal_shift: u8,
    least_shift: u8,
    most_sectors: u32,
    chunk_sectors: u32,
    sectors: u64,
    boundary: u64,
    discard_alignment: u32,
    discard_granularity: u32,
    most_discard_sectors: u32,
    most_zero_sectors: u32,
    most_discard_segments: u16,
    reserved: u16,
}

/// A request, as the driver describes it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Description {
    operation: u32,
    sectors: u32,
    first: u64,
    address: u64,
}

/// A command about a request.
#[repr(C)]
#[derive(Clone, Copy)]
struct IoCommand {
    queue: u16,
    tag: u16,
    result: i32,
    address: u64,
}

const _: () = assert!(size_of::<ControlCommand>() == 32 && size_of::<DeviceInfo>() == 64);
const _: () = assert!(size_of::<IoCommand>() == 16 && size_of::<Description>() == 24);

/// What a device is to be.
#[derive(Debug, Clone, Copy)]
pub struct DeviceOptions {
    /// Bytes, a multiple of 4096.
    pub size: u64,
    /// Queues, each served by a thread.
    pub queues: u16,
    /// Requests of a queue at a time, at most 4096.
    pub depth: u16,
    /// Bytes of the largest request, a multiple of 4096.
    pub buffer_bytes: u32,
}

/// A device of this process. Dropping it stops and removes it, which waits for its requests: the queues must
/// be served meanwhile.
pub struct Device {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    control: File,
    number: u32,
    options: DeviceOptions,
    channel: Option<Arc<File>>,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device")
            .field("number", &self.number)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Device {
    /// Adds a device, whose block device appears when it is [started](Self::start).
    ///
    /// # Errors
    ///
    /// `NotFound` if the kernel has no ublk driver loaded; `PermissionDenied` without `CAP_SYS_ADMIN`; what the
    /// driver refuses.
    pub fn add(options: DeviceOptions) -> io::Result<Device> {
        let control = OpenOptions::new().read(true).write(true).open(CONTROL)?;
        let mut device = Device {
            ring: IoUring::builder().build(4)?,
            control,
            number: u32::MAX,
            options,
            channel: None,
        };
        let mut info = DeviceInfo {
            queues: options.queues,
            depth: options.depth,
            buffer_bytes: options.buffer_bytes,
            // Any.
            device: u32::MAX,
            ..DeviceInfo::default()
        };
        device.control_with(ADD, &mut info)?;
        // From here on dropping it removes it.
        device.number = info.device;
        device.options.queues = info.queues;
        device.options.depth = info.depth;
        let mut parameters = device.parameters();
        device.control_with(SET_PARAMETERS, &mut parameters)?;
        let path = format!("/dev/ublkc{}", device.number);
        let channel = OpenOptions::new().read(true).write(true).open(path)?;
        device.channel = Some(Arc::new(channel));
        Ok(device)
    }

    fn parameters(&self) -> Parameters {
        const BASIC: u32 = 1;
        const DISCARD: u32 = 2;
        const PAGE_SHIFT: u8 = 12;
        let most = u32::MAX >> 9;
        Parameters {
            length: size_of::<Parameters>() as u32,
            types: BASIC | DISCARD,
            // Neither rotating nor with a cache.
            attributes: 0,
            logical_shift: PAGE_SHIFT,
            physical_shift: PAGE_SHIFT,
            optimal_shift: PAGE_SHIFT,
            least_shift: PAGE_SHIFT,
            most_sectors: self.options.buffer_bytes / SECTOR as u32,
            sectors: self.options.size / SECTOR,
            discard_granularity: 1 << PAGE_SHIFT,
            most_discard_sectors: most & !7,
            most_zero_sectors: most & !7,
            most_discard_segments: 1,
            ..Parameters::default()
        }
    }

    /// Its block device.
    pub fn path(&self) -> String {
        format!("/dev/ublkb{}", self.number)
    }

    /// Queues that the kernel gave it: perhaps fewer than asked for.
    pub fn queues(&self) -> u16 {
        self.options.queues
    }

    /// What a queue's thread needs to [open](QueueOpener::open) it.
    pub fn opener(&self, queue: u16) -> QueueOpener {
        QueueOpener {
            channel: self.channel.clone().expect("it was added"),
            queue,
            options: self.options,
        }
    }

    /// Makes the block device appear. Waits until each queue is open.
    ///
    /// # Errors
    ///
    /// What the driver refuses.
    pub fn start(&mut self) -> io::Result<()> {
        let command = ControlCommand {
            data: [u64::from(std::process::id()), 0],
            ..ControlCommand::default()
        };
        self.control(START, command)
    }

    /// Makes the block device go. Requests that are not served fail; those that are, are waited for.
    ///
    /// # Errors
    ///
    /// What the driver refuses.
    pub fn stop(&mut self) -> io::Result<()> {
        self.control(STOP, ControlCommand::default())
    }

    fn control_with<T>(&mut self, operation: u32, buffer: &mut T) -> io::Result<()> {
        let command = ControlCommand {
            length: size_of::<T>() as u16,
            address: std::ptr::from_mut(buffer) as u64,
            ..ControlCommand::default()
        };
        self.control(operation, command)
    }

    /// Has a command executed, and waits for it.
    fn control(&mut self, operation: u32, command: ControlCommand) -> io::Result<()> {
        let command = ControlCommand {
            device: self.number,
            queue: u16::MAX,
            ..command
        };
        let mut bytes = [0; 80];
        let fields: [u64; 4] = [
            u64::from(command.device)
                | u64::from(command.queue) << 32
                | u64::from(command.length) << 48,
            command.address,
            command.data[0],
            command.data[1],
        ];
        for (place, field) in bytes.chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        let descriptor = Fd(self.control.as_raw_fd());
        let entry = opcode::UringCmd80::new(descriptor, operation)
            .cmd(bytes)
            .build();
        // SAFETY: the descriptor and what the command's address names live until this function returns, and it
        // returns after the completion.
        unsafe { self.ring.submission().push(&entry) }.expect("the ring is empty");
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if let Some(completion) = self.ring.completion().next() {
                return match completion.result() {
                    0.. => Ok(()),
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.number == u32::MAX {
            return;
        }
        // It may have been stopped, or never started. What cannot be removed is left to the administrator.
        let _ = self.stop();
        drop(self.channel.take());
        let _ = self.control(DELETE, ControlCommand::default());
    }
}

/// What opens a queue in the thread that serves it.
#[derive(Debug)]
pub struct QueueOpener {
    channel: Arc<File>,
    queue: u16,
    options: DeviceOptions,
}

/// A mapping of the driver's descriptions of requests.
#[derive(Debug)]
struct Descriptions {
    start: NonNull<c_void>,
    bytes: usize,
}

impl Descriptions {
    fn map(channel: &File, queue: u16, depth: u16) -> io::Result<Descriptions> {
        let bytes = (usize::from(depth) * size_of::<Description>()).next_multiple_of(4096);
        let offset = usize::from(queue) * QUEUE_STRIDE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                channel.as_fd(),
                offset as u64,
            )
        }?;
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Descriptions { start, bytes })
    }

    fn get(&self, tag: u16) -> Description {
        let place = self.start.cast::<Description>();
        assert!((usize::from(tag) + 1) * size_of::<Description>() <= self.bytes);
        // SAFETY: inside the mapping, which lives as long as this; the driver wrote it before it completed the
        // fetch of this tag, and writes it again only after the commit.
        unsafe { place.as_ptr().add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptions {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        let _ = unsafe { munmap(self.start.as_ptr(), self.bytes) };
    }
}

/// A queue of a device, in the thread that opened it.
pub struct Queue {
    // Dropped first: no command is under way when the buffers go.
    ring: IoUring,
    buffers: Vec<Box<[u8]>>,
    descriptions: Descriptions,
    channel: Arc<File>,
    number: u16,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

/// What a queue is asked for. Offsets and lengths are in bytes.
#[derive(Debug)]
pub enum Request<'a> {
    /// Fill the buffer.
    Read {
        /// Where to start.
        offset: u64,
        /// What to fill.
        buffer: &'a mut [u8],
    },
    /// Write the data.
    Write {
        /// Where to start.
        offset: u64,
        /// What to write.
        data: &'a [u8],
    },
    /// Make what was written durable.
    Flush,
    /// Forget a range.
    Discard {
        /// Where to start.
        offset: u64,
        /// How much.
        length: u64,
    },
    /// Make a range zeros.
    Zero {
        /// Where to start.
        offset: u64,
        /// How much.
        length: u64,
        /// Keep it allocated.
        keep: bool,
    },
}

impl QueueOpener {
    /// Opens the queue for this thread, which the kernel takes for one that writes pages out: what it
    /// allocates never waits for its own device.
    ///
    /// # Errors
    ///
    /// If there is no memory or `io_uring` for it, or without `CAP_SYS_RESOURCE`.
    pub fn open(self) -> io::Result<Queue> {
        const PR_SET_IO_FLUSHER: i32 = 57;
        // SAFETY: changes a flag of this thread.
        if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        let depth = self.options.depth;
        let bytes = self.options.buffer_bytes as usize;
        let mut queue = Queue {
            ring: IoUring::builder().build(u32::from(depth))?,
            buffers: (0..depth)
                .map(|_| vec![0; bytes].into_boxed_slice())
                .collect(),
            descriptions: Descriptions::map(&self.channel, self.queue, depth)?,
            channel: self.channel,
            number: self.queue,
        };
        for tag in 0..depth {
            queue.push(FETCH, tag, 0);
        }
        queue.ring.submit()?;
        Ok(queue)
    }
}

impl Queue {
    fn push(&mut self, operation: u32, tag: u16, result: i32) {
        let address = self.buffers[usize::from(tag)].as_mut_ptr() as u64;
        let mut bytes = [0; 16];
        let first = u64::from(self.number) | u64::from(tag) << 16 | u64::from(result as u32) << 32;
        bytes[..8].copy_from_slice(&first.to_le_bytes());
        bytes[8..].copy_from_slice(&address.to_le_bytes());
        let descriptor = Fd(self.channel.as_raw_fd());
        let entry = opcode::UringCmd16::new(descriptor, operation)
            .cmd(bytes)
            .build()
            .user_data(tag.into());
        // SAFETY: the buffer lives as long as the ring; the kernel uses it only between the completion of a
        // fetch and its commit, by this thread, except for what a system call of this thread copies.
        unsafe { self.ring.submission().push(&entry) }.expect("one command for each tag");
    }

    /// Serves requests until the device is stopped. `serve` returns an errno for one that fails.
    ///
    /// # Errors
    ///
    /// If the ring fails, or the driver refuses a command.
    pub fn serve(
        &mut self,
        mut serve: impl FnMut(Request<'_>) -> Result<(), i32>,
    ) -> io::Result<()> {
        const ABORTED: i32 = -libc::ENODEV;
        let mut open = self.buffers.len();
        let mut ready: Vec<(u16, i32)> = Vec::with_capacity(open);
        while open > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            let completions = self.ring.completion();
            ready.extend(completions.map(|done| (done.user_data() as u16, done.result())));
            while let Some((tag, result)) = ready.pop() {
                match result {
                    0 => {
                        let result = self.request(tag, &mut serve);
                        self.push(COMMIT_AND_FETCH, tag, result);
                    }
                    ABORTED => open -= 1,
                    error => return Err(io::Error::from_raw_os_error(-error)),
                }
            }
        }
        Ok(())
    }

    /// Serves the request of a tag: the bytes that were done, or an errno below zero.
    fn request(&mut self, tag: u16, serve: &mut impl FnMut(Request<'_>) -> Result<(), i32>) -> i32 {
        const KEEP: u32 = 1 << 15;
        let description = self.descriptions.get(tag);
        let buffer = &mut self.buffers[usize::from(tag)];
        let offset = description.first.saturating_mul(SECTOR);
        let length = u64::from(description.sectors) * SECTOR;
        let data = buffer.get_mut(..length as usize);
        let request = match (description.operation & 0xff, data) {
            (0, Some(buffer)) => Request::Read { offset, buffer },
            (1, Some(data)) => Request::Write { offset, data },
            (2, _) => Request::Flush,
            (3, _) => Request::Discard { offset, length },
            (5, _) => Request::Zero {
                offset,
                length,
                keep: description.operation & KEEP != 0,
            },
            _ => return -libc::EOPNOTSUPP,
        };
        let is_data = matches!(request, Request::Read { .. } | Request::Write { .. });
        match serve(request) {
            Ok(()) if is_data => length as i32,
            Ok(()) => 0,
            Err(errno) => -errno,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_drivers() {
        assert_eq!(ADD, 0xc020_7504);
        assert_eq!(SET_PARAMETERS, 0xc020_7508);
        assert_eq!(FETCH, 0xc010_7520);
        assert_eq!(std::mem::offset_of!(Parameters, sectors), 24);
        assert_eq!(std::mem::offset_of!(Parameters, discard_granularity), 44);
        assert_eq!(std::mem::offset_of!(DeviceInfo, flags), 24);
    }

    #[test]
    fn without_a_driver_there_is_no_device() {
        if std::path::Path::new(CONTROL).exists() {
            return;
        }
        let options = DeviceOptions {
            size: 1 << 20,
            queues: 1,
            depth: 1,
            buffer_bytes: 4096,
        };
        let error = Device::add(options).expect_err("there is no driver");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
