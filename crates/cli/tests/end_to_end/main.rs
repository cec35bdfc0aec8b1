//! `memfold run` with real programs: results compared with unlimited runs, limits
//! sampled from outside, forks, crashes and hangs.
//!
//! The programs are in `tests/programs`; `MEMFOLD_TEST_ROUNDS` says how much of each test is run
//! (`support::rounds`). libtest starts tests in the order of their names: those that need the machine
//! for themselves come first.
#![allow(
    unreachable_pub,
    reason = "nothing in a program is reachable from outside"
)]

#[macro_use]
mod support;

mod alone;
mod beside;
