//! The supervised engine: programs in other processes, kept under one limit.
//!
//! Data flows from a fault to the pool and back:
//!
//! | module | what happens there |
//! |---|---|
//! | [`fault`] | userfaultfd messages are read and faults served: swap-in, zero fill, return from the stage, COW, readahead |
//! | [`events`] | unmap, remap, madvise: put in an order in which they were possible, and applied |
//! | [`fork`] | fork events: what the child inherited, which process it is, what both share |
//! | [`reclaim`] | the clock hand picks victims, a batch moves them to the stage, the reclaimer stores them |
//! | [`registration`] | which mappings are registered with a userfaultfd, and when |
//! | [`helper`] | which processes may connect, the take-over of a stopped helper, the end with the supervisor |
//! | [`swap`] | the background thread and the swap file |
//! | [`space`] | one program: its page states, its gate, its life |
//! | [`group`] | the programs under one limit |
//! | [`resources`] | what all address spaces use: swap space, counters, room under the limit |
//! | [`util`] | shortage of descriptors, time that passed while the thread ran |

pub mod events;
pub mod fault;
pub mod fork;
pub mod group;
pub mod helper;
pub mod latency;
pub mod reclaim;
pub mod registration;
pub mod resources;
pub mod space;
pub mod stats;
pub mod supervisor;
pub mod swap;
pub mod util;
