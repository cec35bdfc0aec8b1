//! The supervised engine: programs in other processes, kept under one limit.
//!
//! | module | what happens there |
//! |---|---|
//! | [`fault`] | userfaultfd messages are read and faults served: swap-in, zero fill, return from the stage, COW, readahead |
//! | [`events`] | munmap, mremap and madvise events are reordered and applied |
//! | [`fork`] | fork events: pages that the child inherited, its PID, pages that both share |
//! | [`reclaim`] | the clock hand picks victims, a batch moves them to the stage, the reclaimer stores them |
//! | [`registration`] | mappings are registered with a userfaultfd, and unregistered |
//! | [`kernel`] | what the core asks of the kernel, on Linux and in the simulation |
//! | [`helper`] | helpers connect, a stopped helper's gate is taken over, programs are killed with the supervisor |
//! | [`swap`] | the background thread and the swap file |
//! | [`space`] | one program: its page states, its gate, its lifecycle |
//! | [`group`] | the programs under one limit |
//! | [`limit_state`] | the limit in force, and whether it is kept |
//! | [`floor`] | what stays resident where the limit cannot be held |
//! | [`mappings`] | what each mapping of a program has in memory and outside |
//! | [`refaults`], [`comfort`] | refault distances, and the limit that they suggest |
//! | [`resources`] | shared by all address spaces: swap space, counters, the resident limit |
//! | [`stats`], [`latency`] | statistics, the histogram of fault latency |
//! | [`util`] | descriptor shortage, time in which this process ran, tracers that reclaim spares |

pub(crate) mod comfort;
pub(crate) mod events;
pub(crate) mod fault;
pub(crate) mod floor;
pub(crate) mod fork;
pub(crate) mod group;
pub(crate) mod helper;
pub(crate) mod kernel;
pub(crate) mod latency;
pub(crate) mod limit_state;
#[cfg(not(simulated))]
pub(crate) mod mappings;
pub(crate) mod reclaim;
pub(crate) mod refaults;
pub(crate) mod registration;
pub(crate) mod resources;
pub(crate) mod space;
#[cfg(not(simulated))]
pub(crate) mod start_error;
pub(crate) mod stats;
#[cfg(not(simulated))]
pub(crate) mod supervisor;
#[cfg(not(simulated))]
pub(crate) mod swap;
pub(crate) mod util;
