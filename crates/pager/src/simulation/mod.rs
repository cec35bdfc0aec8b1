//! The core under a simulated kernel: its threads, a model of Linux, and programs that know what each of
//! their pages must hold, scheduled by a seed.
//!
//! A seed makes a [`History`](history::History), what the programs do, and a schedule. The same seed is
//! the same execution. `docs/testing.md` says what this can find, and how to add to it.
//!
//! | module | holds |
//! |---|---|
//! | `model` | what Linux does |
//! | `history`, `program` | what programs do, and what they check |
//! | `run`, `world` | one execution: memfold's threads beside the program's |
//! | `held_gate` | programs beside one whose gate is held |
//! | `ended_helper` | a process that outlives the helper of its memory |
//! | `doubtful` | a program that unmaps memory whenever it is looked at |
//! | `lost_pages` | a child that forks though it has lost pages |
//! | `spared_pages` | what a program uses all the time, beside what it uses now and then |
//! | `unposted` | a program that moves memory, of which nothing leaves |
//! | `explore` | many executions; the shortest history that fails |
//! | `adversity` | what goes wrong in the kernel beside |
//! | `progress` | whether programs still do something |
//! | `trace` | an execution, step by step |
//! | `conformance` | the model compared with Linux |
//! | `sync`, `time` | what the core locks, waits and sleeps with |

pub mod adversity;
pub mod conformance;
pub mod doubtful;
pub mod ended_helper;
pub mod explore;
pub mod held_gate;
pub mod history;
pub mod lost_pages;
pub(crate) mod model;
pub(crate) mod program;
pub mod progress;
pub(crate) mod run;
pub mod spared_pages;
pub(crate) mod sync;
pub(crate) mod time;
pub mod trace;
pub mod unposted;
pub(crate) mod world;
