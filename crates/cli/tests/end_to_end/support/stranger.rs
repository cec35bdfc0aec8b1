//! Other users, and folders that they can reach.

use super::{copy_program, memfold};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A user who is not root.
pub const STRANGER: u32 = 65534;
/// Another one.
pub const OTHER: u32 = 65533;

/// A command that a user executes, with no other groups and none of root's variables.
pub fn as_user(user: u32, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    let user = user.to_string();
    command
        .args(["--reuid", &user, "--regid", &user, "--clear-groups"])
        .arg(program)
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("TMPDIR");
    command
}

/// A folder that all users can search, with a memfold in it.
pub struct Stage {
    folder: TempDir,
}

impl Stage {
    pub fn new() -> Stage {
        // Where it is still seen when a test mounts something else over /tmp.
        let folder = tempfile::tempdir_in("/var/lib").expect("a folder");
        let stage = Stage { folder };
        stage.allow("", 0o755);
        copy_program(memfold(), &stage.memfold());
        stage.allow("memfold", 0o755);
        stage
    }

    pub fn memfold(&self) -> PathBuf {
        self.path("memfold")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Sets the mode of what is under that name.
    pub fn allow(&self, name: &str, mode: u32) {
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(self.path(name), permissions).expect("permissions");
    }

    /// A new folder in it, of root.
    pub fn folder(&self, name: &str, mode: u32) -> PathBuf {
        fs::create_dir(self.path(name)).expect("a folder");
        self.allow(name, mode);
        self.path(name)
    }

    /// A copy of a program in it, for all users.
    pub fn program(&self, program: &Path, name: &str) -> PathBuf {
        copy_program(program, &self.path(name));
        self.allow(name, 0o755);
        self.path(name)
    }

    /// Gives memfold its capability.
    pub fn set_capability(&self) {
        let status = Command::new("setcap")
            .arg("cap_sys_ptrace=ep")
            .arg(self.memfold())
            .status()
            .expect("setcap runs");
        assert!(status.success(), "setcap: {status}");
    }

    /// Executes a script in a mount namespace of its own, where /tmp is empty and every user may open
    /// /dev/userfaultfd.
    pub fn run(&self, script: &str) -> Output {
        let mounts = "set -e; dev=/mnt; mount -t tmpfs none $dev; \
             cp -a /dev/userfaultfd $dev/u; chmod 666 $dev/u; mount --bind $dev/u /dev/userfaultfd; \
             mount -t tmpfs -o mode=1777 none /tmp; set +e; cd \"$1\"; ";
        Command::new("unshare")
            .args(["-m", "sh", "-c", &format!("{mounts}{script}"), "sh"])
            .arg(self.folder.path())
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("TMPDIR")
            .output()
            .expect("unshare runs")
    }

    /// The same, of a command that [`STRANGER`] executes.
    pub fn run_as_stranger(&self, command: &str) -> Output {
        self.run(&format!(
            "setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups {command}"
        ))
    }
}
