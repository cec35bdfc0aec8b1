//! Zygotes: processes that a browser starts to fork others from, and that insist on having one thread.
//!
//! Chromium, and what is built on it (Electron, `QtWebEngine`), ends a zygote that has two threads when it sets up its sandbox,
//! also where it has none to set up. Nothing tells such a process from others but its command line. Who writes one to be
//! taken for a zygote has a program outside the limit, as who makes a static program or clears the environment has.

/// The argument by which a zygote is known.
const ARGUMENT: &[u8] = b"--type=zygote";

/// How much of a command line is looked at: the argument is among the first.
pub const LOOKED_AT: usize = 4096;

/// Finds in a `/proc/PID/cmdline` whether that process is a zygote. Byte by byte, as the preload library has nothing to compare
/// strings with.
#[derive(Clone, Copy, Debug)]
pub struct ZygoteSearch {
    /// Bytes that are looked at yet.
    left: usize,
    /// So much of the argument is right so far; `None` in another one.
    matched: Option<usize>,
    found: bool,
}

impl Default for ZygoteSearch {
    fn default() -> ZygoteSearch {
        ZygoteSearch {
            left: LOOKED_AT,
            matched: Some(0),
            found: false,
        }
    }
}

impl ZygoteSearch {
    /// Looks at what comes next in the file.
    pub fn look(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.left == 0 {
                return;
            }
            self.left -= 1;
            self.matched = if *byte == 0 {
                self.found |= self.matched == Some(ARGUMENT.len());
                Some(0)
            } else {
                let next = self.matched.and_then(|at| Some((at, ARGUMENT.get(at)?)));
                next.filter(|(_, expected)| *expected == byte)
                    .map(|(at, _)| at + 1)
            };
        }
    }

    /// Whether it is one, by what was looked at.
    pub fn is_zygote(&self) -> bool {
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zygotes_are_known_by_their_argument() {
        let is_zygote = |text: &[u8], part: usize| {
            let mut search = ZygoteSearch::default();
            text.chunks(part).for_each(|part| search.look(part));
            search.is_zygote()
        };
        for part in [1, 5, 4096] {
            assert!(is_zygote(
                b"/usr/bin/browser\0--type=zygote\0--no-sandbox\0",
                part
            ));
            assert!(!is_zygote(b"sh\0-c\0browser --type=zygote\0", part));
            let mut late = [b'x'; LOOKED_AT + 20];
            late[LOOKED_AT..][..15].copy_from_slice(b"\0--type=zygote\0");
            assert!(!is_zygote(&late, part));
            assert!(!is_zygote(b"browser\0--type=renderer\0", part));
            assert!(!is_zygote(b"browser\0--type=zygotes\0", part));
            assert!(!is_zygote(b"browser\0x--type=zygote\0", part));
            assert!(!is_zygote(b"browser\0--type=zygot", part));
            assert!(!is_zygote(b"", part));
        }
    }
}
