//! `memfold run` with real programs: results compared with unlimited runs, limits
//! sampled from outside, forks, crashes and hangs.
//!
//! The programs are in `tests/programs`; `MEMFOLD_TEST_ROUNDS` says how often each
//! comparison is repeated.  Tests run one at a time, whatever the number of threads.

mod admission;
mod asked_twice;
mod capability;
mod crash;
mod debuggers;
mod departures;
mod few_descriptors;
mod growth;
mod harness;
mod helper;
mod host_swap;
mod inherited;
mod intruders;
mod leftovers;
mod own_userfaultfd;
mod pass_through;
mod processes;
mod programs;
mod redirected;
mod redis;
mod repeat;
mod support;
mod tiers;
mod torture;
