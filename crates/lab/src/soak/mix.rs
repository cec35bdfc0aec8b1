//! The programs of the mix.

use anyhow::{Context, Result};

use crate::kernel::{find_program, real_python};

/// A program of the mix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guest {
    /// A server that keeps replacing a live heap of constant size.
    Node,
    /// redis-server with background saves while all keys are overwritten.
    Redis,
    /// Python objects that are replaced, and forks that read them.
    Python,
    /// A shell that forks continuously.
    Shell,
    /// mmap and munmap at random addresses.
    Mappings,
}

impl Guest {
    /// All programs.
    pub const ALL: [Self; 5] = [
        Self::Node,
        Self::Redis,
        Self::Python,
        Self::Shell,
        Self::Mappings,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Redis => "redis",
            Self::Python => "python",
            Self::Shell => "shell",
            Self::Mappings => "mappings",
        }
    }

    /// The program of that name.
    pub fn parse(name: &str) -> Result<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|guest| guest.name() == name)
            .with_context(|| format!("unknown program {name:?}"))
    }

    /// Name of its file in the folder.
    pub fn file(self) -> &'static str {
        match self {
            Self::Node => "server.js",
            Self::Redis => "dump.rdb",
            Self::Python => "churn.py",
            Self::Shell => "forks.sh",
            Self::Mappings => "mappings",
        }
    }

    /// Its source, unless it is installed on the host.
    pub fn source(self) -> Option<&'static str> {
        match self {
            Self::Node => Some(include_str!("../../programs/soak/server.js")),
            Self::Redis => None,
            Self::Python => Some(include_str!("../../programs/soak/churn.py")),
            Self::Shell => Some(include_str!("../../programs/soak/forks.sh")),
            Self::Mappings => Some(include_str!("../../programs/soak/mappings.c")),
        }
    }

    /// Why it cannot run on this host, if so.
    pub fn missing(self) -> Option<String> {
        let (found, package) = match self {
            Self::Node => (find_program("node"), "nodejs"),
            Self::Redis => (find_program("redis-server"), "redis-server"),
            Self::Python => (real_python("python3").map(drop), "python3"),
            Self::Shell => return None,
            Self::Mappings => (find_program("cc"), "gcc"),
        };
        let error = found.err()?;
        Some(format!(
            "{} is left out: {error:#} (Debian: {package})",
            self.name()
        ))
    }
}
