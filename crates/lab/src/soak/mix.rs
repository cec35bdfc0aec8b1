//! Which programs take part.

use anyhow::{Context, Result};

use crate::kernel::{find_program, real_python};

/// One of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guest {
    /// A server with a constant live heap, all of which it replaces again and again.
    Node,
    /// redis-server, saved while everything in it is overwritten.
    Redis,
    Python,
    /// A shell that forks all the time.
    Shell,
    /// Mappings at random addresses.
    Mappings,
}

impl Guest {
    pub const ALL: [Self; 5] = [
        Self::Node,
        Self::Redis,
        Self::Python,
        Self::Shell,
        Self::Mappings,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Node => "node",
            Self::Redis => "redis",
            Self::Python => "python",
            Self::Shell => "shell",
            Self::Mappings => "mappings",
        }
    }

    pub fn parse(name: &str) -> Result<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|guest| guest.name() == name)
            .with_context(|| format!("there is no program {name:?}"))
    }

    /// What its file is called.
    pub fn file(self) -> &'static str {
        match self {
            Self::Node => "server.js",
            Self::Redis => "dump.rdb",
            Self::Python => "churn.py",
            Self::Shell => "forks.sh",
            Self::Mappings => "mappings",
        }
    }

    pub fn source(self) -> Option<&'static str> {
        match self {
            Self::Node => Some(include_str!("../../programs/soak/server.js")),
            Self::Redis => None,
            Self::Python => Some(include_str!("../../programs/soak/churn.py")),
            Self::Shell => Some(include_str!("../../programs/soak/forks.sh")),
            Self::Mappings => Some(include_str!("../../programs/soak/mappings.c")),
        }
    }

    /// Why it cannot run here, if it cannot.
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
            "{} left out: {error:#} (Debian: {package})",
            self.name()
        ))
    }
}
