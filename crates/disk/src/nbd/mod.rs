//! The NBD protocol: fixed newstyle negotiation, structured replies, block status.
//!
//! Source: the protocol's specification (`doc/proto.md` of the NBD project). What is not here: TLS,
//! extended headers, `NBD_CMD_CACHE`, `NBD_CMD_RESIZE`.
//!
//! Each connection has one thread and two buffers of [`BUFFER`] bytes; slow reads that came together are shared with
//! a team of threads. Replies to requests that came together leave together, or before a wait, so a client that keeps
//! several requests under way costs few system calls. All that a client sends is checked before it is used, and nothing
//! is allocated by its word beyond the buffers' size: payloads and replies pass through the buffers in pieces.

mod handshake;
mod server;
mod team;
mod transmission;
mod wire;

pub use handshake::{Agreed, HandshakeError, negotiate};
pub use server::{Connection, MOST_CONNECTIONS, Server, serve_connection};
pub use transmission::transmit;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use {team::Team, transmission::transmit_beside};

/// Bytes of a connection's buffers. More makes fewer system calls of large requests.
pub const BUFFER: usize = 256 << 10;
