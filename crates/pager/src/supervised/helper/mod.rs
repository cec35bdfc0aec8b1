//! The helper thread of a program: its admission, its take-over, its end.

pub mod accept;
pub mod admission;
pub mod discard;
pub mod peer;
pub mod pending;
pub mod takeover;
