//! The process at the other end of a connection.

use crate::supervised::helper::discard::Connection;
use crate::supervised::space::AddressSpace;
use crate::sync::lock;
use memfold_sys::hello::{MAGIC, Welcome};
use memfold_sys::process::{self, Inspector, Process};
use memfold_sys::{privilege, socket, uffd};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// A process that connected.
#[derive(Debug)]
pub(crate) struct Peer {
    pub connection: Connection,
    pub process: Arc<Process>,
}

impl Peer {
    /// Lends `/dev/userfaultfd`, once, to a program of this run that changed its user: it may do what this
    /// process may, and says hello again.
    pub(crate) fn lend(&self, refused: u64, is_lent: bool) -> io::Result<()> {
        let why = io::Error::from_raw_os_error(i32::try_from(refused).unwrap_or(0));
        if why.kind() == io::ErrorKind::PermissionDenied
            && !is_lent
            && let Ok(device) = uffd::open_device()
        {
            let welcome = Welcome {
                magic: MAGIC,
                ..Welcome::default()
            };
            return socket::send_welcome(self.connection.as_fd(), &welcome, &[device.as_fd()]);
        }
        Err(io::Error::other(format!(
            "it may not use userfaultfd ({why})"
        )))
    }

    /// Opens the files by which the peer is inspected.
    ///
    /// A file capability of this process is used for forked children that the kernel reported, and for
    /// processes of this process's user, never for others. The peer must prove itself before anything is
    /// read through these files.
    pub(crate) fn inspect(
        &self,
        thread: i32,
        claimed: Option<&AddressSpace>,
        prepares_forks: bool,
    ) -> io::Result<Inspector> {
        let is_child = claimed.is_some();
        let is_compared = claimed.is_none_or(|space| lock(&space.fork.inheritance).is_none());
        let open = || {
            // The flags are needed for each prepared fork, also once the program is no longer dumpable.
            if !is_compared || process::kernel_seals() || prepares_forks {
                Inspector::open_with_flags(&self.process, thread)
            } else {
                Inspector::open(&self.process, thread)
            }
        };
        let opened = open();
        let is_refused = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
        if opened.as_ref().is_err_and(is_refused)
            && (is_child || self.process.owner().ok() == Some(process::own_user()))
        {
            let _raised = privilege::raised();
            return open();
        }
        opened
    }
}
