//! Which tests run at the same time, and which cannot run here.

use super::find_program;
use memfold_testing::skip;
use std::cell::Cell;
use std::path::Path;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Whether a test shares the machine with other tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// No other test runs: it judges whether a limit holds, or how long something takes.
    Alone,
    /// All tests of this kind may run at once.
    Beside,
}

/// Keeps tests apart until it is dropped.
pub enum Turn {
    /// Of one that runs alone.
    Alone {
        _guard: RwLockWriteGuard<'static, ()>,
    },
    /// Of those that run side by side.
    Beside {
        _guard: RwLockReadGuard<'static, ()>,
    },
}

/// Leaves a test out of the short form, in which `.ci/run` ends within half an hour.
macro_rules! only_in_the_long_form {
    () => {
        if !crate::support::is_long() {
            println!("left out of the short form: MEMFOLD_TEST_ROUNDS=2 has it");
            return;
        }
    };
}

/// Begins a test that no other may run beside; leaves it if one of the programs that it needs is missing.
macro_rules! alone {
    ($tools:expr) => {
        let Some(_turn) = $crate::support::turn($crate::support::Share::Alone, $tools) else {
            return;
        };
    };
}

/// Begins a test that others run beside; leaves it if one of the programs that it needs is missing.
macro_rules! beside {
    ($tools:expr) => {
        let Some(_turn) = $crate::support::turn($crate::support::Share::Beside, $tools) else {
            return;
        };
    };
}

thread_local! {
    /// Of the test that this thread runs.
    static SHARE: Cell<Share> = const { Cell::new(Share::Alone) };
}

/// How the test that this thread runs shares the machine.
pub fn share_of_this_test() -> Share {
    SHARE.get()
}

/// Waits until a test may begin; nothing, said aloud, if this machine lacks what it needs.
pub fn turn(share: Share, tools: &[&str]) -> Option<Turn> {
    static MACHINE: RwLock<()> = RwLock::new(());
    let missing = missing(tools);
    if !missing.is_empty() {
        skip(&missing.join(", "));
        return None;
    }
    SHARE.set(share);
    // A test that failed leaves nothing behind that others see.
    Some(match share {
        Share::Alone => Turn::Alone {
            _guard: MACHINE.write().unwrap_or_else(PoisonError::into_inner),
        },
        Share::Beside => Turn::Beside {
            _guard: MACHINE.read().unwrap_or_else(PoisonError::into_inner),
        },
    })
}

fn missing(tools: &[&str]) -> Vec<String> {
    let mut missing: Vec<String> = tools
        .iter()
        .filter(|tool| find_program(tool).is_none())
        .map(|tool| format!("the program {tool}"))
        .collect();
    if !nix::unistd::geteuid().is_root() {
        missing.push("root".to_owned());
    }
    if !Path::new("/proc/sys/vm/unprivileged_userfaultfd").exists() {
        missing.push("userfaultfd in the kernel".to_owned());
    }
    missing
}
