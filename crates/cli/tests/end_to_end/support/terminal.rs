//! A real terminal, of tmux.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// A terminal of its own server, which goes with this.
pub struct Terminal {
    server: String,
}

impl Terminal {
    /// Runs a shell command in it.
    pub fn start(width: u32, command: &str) -> Terminal {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let server = format!("memfold-{}-{number}", std::process::id());
        let terminal = Terminal { server };
        let width = width.to_string();
        let size = ["-x", width.as_str(), "-y", "30"];
        terminal.tmux(
            &[
                &["-f", "/dev/null", "new-session", "-d"],
                &size[..],
                &[command],
            ]
            .concat(),
        );
        terminal
    }

    /// What a command of tmux prints.
    pub fn tmux(&self, arguments: &[&str]) -> String {
        let output = Command::new("tmux")
            .args(["-u", "-L", &self.server])
            .args(arguments)
            .output()
            .expect("tmux runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Presses keys, each named as tmux names it.
    pub fn press(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    /// Types a text.
    pub fn types(&self, text: &str) {
        self.tmux(&["send-keys", "-l", text]);
    }

    /// Waits until the screen is as expected.
    pub fn shows(&self, what: &str, expected: impl Fn(&str) -> bool) -> String {
        let shown = self.shows_within(Duration::from_secs(20), expected);
        shown.unwrap_or_else(|screen| panic!("{what}:\n{screen}"))
    }

    /// The same once a key is pressed, again if a terminal that has just started lost it.
    pub fn shows_at(&self, key: &str, what: &str, expected: impl Fn(&str) -> bool) -> String {
        for _ in 0..3 {
            self.press(&[key]);
            if let Ok(screen) = self.shows_within(Duration::from_secs(7), &expected) {
                return screen;
            }
        }
        self.shows(what, expected)
    }

    /// The screen as expected, or the last one.
    pub fn shows_within(
        &self,
        patience: Duration,
        expected: impl Fn(&str) -> bool,
    ) -> Result<String, String> {
        let began = Instant::now();
        loop {
            let screen = self.tmux(&["capture-pane", "-p"]);
            if expected(&screen) {
                return Ok(screen);
            }
            if began.elapsed() > patience {
                return Err(screen);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}
