//! `memfold serve --ublk`: the disk as a block device of this machine.

use crate::arguments::ServeArguments;
use crate::failure::Failure;
use memfold_disk::{Disk, DiskError};
use memfold_pager::MappedSource;
use memfold_swap::Scratch;
use memfold_sys::ublk::{Device, DeviceOptions, Queue, QueueOpener, Request};
use nix::errno::Errno;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Queues at most, each with a thread. More serve more CPUs at once and take more buffers.
const MOST_QUEUES: usize = 4;
/// Requests of a queue at a time.
const DEPTH: u16 = 32;
/// The largest request. With more, a queue's buffers take more memory.
const BUFFER_BYTES: u32 = 128 << 10;

/// A block device. It goes on drop; requests that are under way are served before.
#[derive(Debug)]
pub struct BlockDevice {
    // Dropped first: that ends the threads.
    device: Option<Device>,
    threads: Vec<JoinHandle<()>>,
}

impl BlockDevice {
    /// The block device that the options ask for.
    pub fn of(
        arguments: &ServeArguments,
        disk: &Arc<Disk<MappedSource>>,
    ) -> Result<Option<BlockDevice>, Failure> {
        if !arguments.ublk {
            return Ok(None);
        }
        let started = Self::start(disk);
        started.map(Some).map_err(|error| cannot_start(&error))
    }

    fn start(disk: &Arc<Disk<MappedSource>>) -> io::Result<BlockDevice> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let device = Device::add(DeviceOptions {
            size: disk.size(),
            queues: cpus.min(MOST_QUEUES) as u16,
            depth: DEPTH,
            buffer_bytes: BUFFER_BYTES,
        })?;
        let queues = device.queues();
        let mut this = BlockDevice {
            device: Some(device),
            threads: Vec::new(),
        };
        let (opened, all) = channel();
        for number in 0..queues {
            let opener = this.device().opener(number);
            let (disk, opened) = (disk.clone(), opened.clone());
            let builder = std::thread::Builder::new().name("memfold-ublk".to_owned());
            let thread = builder.spawn(move || serve(opener, &disk, &opened))?;
            this.threads.push(thread);
        }
        drop(opened);
        for _ in 0..queues {
            // The kernel would wait for a queue that is not open.
            all.recv().map_err(|_| ErrorKind::BrokenPipe)??;
        }
        this.device().start()?;
        Ok(this)
    }

    fn device(&mut self) -> &mut Device {
        self.device.as_mut().expect("only a drop takes it")
    }

    /// Its path.
    pub fn path(&self) -> String {
        self.device.as_ref().map(Device::path).unwrap_or_default()
    }
}

impl Drop for BlockDevice {
    fn drop(&mut self) {
        if let Some(mut device) = self.device.take() {
            if let Err(error) = device.stop() {
                log::warn!("cannot stop {}: {error}; it is removed", device.path());
            }
            for thread in self.threads.drain(..) {
                // It panics only where the swap space finds a bug, and has reported it.
                let _ = thread.join();
            }
        }
    }
}

/// Serves a queue until the device is stopped.
fn serve(opener: QueueOpener, disk: &Disk<MappedSource>, opened: &Sender<io::Result<()>>) {
    let mut queue: Queue = match opener.open() {
        Ok(queue) => queue,
        Err(error) => {
            // The device is given up then.
            let _ = opened.send(Err(error));
            return;
        }
    };
    let _ = opened.send(Ok(()));
    let mut scratch = Scratch::new();
    let served = queue.serve(|request| {
        execute(request, disk, &mut scratch).map_err(|error| match error {
            DiskError::NoSpace => Errno::ENOSPC as i32,
            _ => Errno::EIO as i32,
        })
    });
    if let Err(error) = served {
        log::error!("a queue of the block device cannot be served any more: {error}");
    }
}

fn execute(
    request: Request<'_>,
    disk: &Disk<MappedSource>,
    scratch: &mut Scratch,
) -> Result<(), DiskError> {
    match request {
        Request::Read { offset, buffer } => disk.read(offset, buffer, scratch),
        Request::Write { offset, data } => disk.write(offset, data, scratch),
        // Nothing outlives the server.
        Request::Flush => Ok(()),
        Request::Discard { offset, length } => disk.discard(offset, length),
        Request::Zero {
            offset,
            length,
            keep,
        } => disk.zero(offset, length, keep, scratch),
    }
}

fn cannot_start(error: &io::Error) -> Failure {
    let remedy = match error.kind() {
        ErrorKind::NotFound => "; load the driver (modprobe ublk_drv), or use --nbd",
        ErrorKind::PermissionDenied => "; start memfold as root, or use --nbd",
        _ => "",
    };
    Failure::own(format!(
        "cannot make a block device (--ublk): {error}{remedy}"
    ))
}
