//! The private folder of a disk: the sockets for `stat` and `top`, and for commands.

use crate::control;
use crate::live::{self, Server};
use crate::run::home::Home;
use crate::run::runtime;
use std::fs;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// The folder, where this user and root find the disk. It goes on drop; the home that it is in stays.
#[derive(Debug)]
pub struct InstanceFolder {
    /// Requests for statistics.
    pub statistics: Server,
    /// Commands.
    pub commands: Server,
    // After the sockets in it.
    _folder: Folder,
}

#[derive(Debug)]
struct Folder {
    path: PathBuf,
    home: Home,
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Only what another put there is left.
        let _ = fs::remove_dir(&self.path);
        self.home.stay();
    }
}

impl InstanceFolder {
    /// Makes it.
    ///
    /// # Errors
    ///
    /// Why there is no folder to make it in, or what could not be made, and what to do.
    pub fn make() -> Result<InstanceFolder, String> {
        let home =
            runtime::prepare().map_err(|reasons| format!("{reasons}; {}", runtime::remedy()))?;
        let failed = |path: &Path, error| format!("cannot make {}: {error}", path.display());
        let path = home.make_folder();
        let path = path.map_err(|error| failed(home.path(), error))?;
        let folder = Folder { path, home };
        let listen = |name: &str| {
            let bound = Server::bind(&folder.path, name);
            bound.map_err(|error| failed(&folder.path.join(name), error))
        };
        let (statistics, commands) = (listen(live::SOCKET)?, listen(control::SOCKET)?);
        folder.home.stay();
        Ok(InstanceFolder {
            statistics,
            commands,
            _folder: folder,
        })
    }

    /// To wait for requests and commands.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.statistics.descriptor(), self.commands.descriptor()]
    }
}
