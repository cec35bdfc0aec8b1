//! Whether the tree of processes can have changed since it was looked at: not where all CPUs were idle.

use memfold_sys::machine::{Idle, OtherWork};
use std::time::Duration;

/// After so long the tree is looked at anyway. Longer finds processes later that start and take no time.
const LONGEST: Duration = Duration::from_secs(5);

/// What is known since the last look.
#[derive(Debug)]
pub struct Stillness {
    /// None where the kernel does not tell.
    others: Option<OtherWork>,
    looked: Option<Idle>,
}

impl Stillness {
    /// Before the first look.
    pub fn new() -> Stillness {
        Stillness {
            others: OtherWork::open().ok(),
            looked: None,
        }
    }

    /// What changes from now on may be missed by the look that begins.
    pub fn begin_look(&mut self) {
        self.looked = self.others.as_ref().and_then(|others| others.now().ok());
    }

    /// Whether another look would find nothing new.
    pub fn is_still(&self) -> bool {
        let (Some(others), Some(looked)) = (&self.others, &self.looked) else {
            return false;
        };
        looked.elapsed() < LONGEST && others.none_since(looked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn what_works_is_looked_at() {
        let mut stillness = Stillness::new();
        assert!(!stillness.is_still(), "before the first look");
        stillness.begin_look();
        let script = "i=0; while [ $i -lt 100000000 ]; do i=$((i+1)); done";
        let mut child = std::process::Command::new("sh")
            .args(["-c", script])
            .spawn()
            .unwrap();
        let began = Instant::now();
        let mut is_still = true;
        while is_still && began.elapsed() < LONGEST / 2 {
            std::thread::sleep(Duration::from_millis(1));
            is_still = stillness.is_still();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_still);
    }
}
