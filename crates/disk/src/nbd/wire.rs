//! Numbers and layouts of the protocol. All integers are big-endian.

use std::io::{self, Read, Write};

/// What the server says first: "NBDMAGIC".
pub(super) const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT".
pub(super) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(super) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(super) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(super) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(super) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags of the server.
pub(super) const FIXED_NEWSTYLE: u16 = 1;
pub(super) const NO_ZEROES: u16 = 2;

/// Options of the negotiation.
pub(super) mod option {
    pub(in crate::nbd) const EXPORT_NAME: u32 = 1;
    pub(in crate::nbd) const ABORT: u32 = 2;
    pub(in crate::nbd) const LIST: u32 = 3;
    pub(in crate::nbd) const INFO: u32 = 6;
    pub(in crate::nbd) const GO: u32 = 7;
    pub(in crate::nbd) const STRUCTURED_REPLY: u32 = 8;
    pub(in crate::nbd) const LIST_META_CONTEXT: u32 = 9;
    pub(in crate::nbd) const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options.
pub(super) mod reply {
    pub(in crate::nbd) const ACK: u32 = 1;
    pub(in crate::nbd) const SERVER: u32 = 2;
    pub(in crate::nbd) const INFO: u32 = 3;
    pub(in crate::nbd) const META_CONTEXT: u32 = 4;
    pub(in crate::nbd) const UNSUPPORTED: u32 = (1 << 31) + 1;
    pub(in crate::nbd) const INVALID: u32 = (1 << 31) + 3;
    pub(in crate::nbd) const UNKNOWN: u32 = (1 << 31) + 6;
    pub(in crate::nbd) const TOO_BIG: u32 = (1 << 31) + 9;
}

/// Types of information about an export.
pub(super) const INFO_EXPORT: u16 = 0;
pub(super) const INFO_BLOCK_SIZE: u16 = 3;

/// What this server can do: flags present, FLUSH, FUA, TRIM, `WRITE_ZEROES`, several connections, and DF with structured
/// replies.
pub(super) fn transmission_flags(structured: bool) -> u16 {
    const DF: u16 = 128;
    let always = 1 | 4 | 8 | 32 | 64 | 256;
    if structured { always | DF } else { always }
}

/// Most bytes of a READ or WRITE.
pub(super) const MOST_BYTES: u32 = 32 << 20;

/// The one metadata context, and its number.
pub(super) const ALLOCATION: &[u8] = b"base:allocation";
pub(super) const ALLOCATION_ID: u32 = 1;
/// Flags of an extent in it.
pub(super) const EXTENT_HOLE: u32 = 1;
pub(super) const EXTENT_ZERO: u32 = 2;

/// Commands.
pub(super) mod command {
    pub(in crate::nbd) const READ: u16 = 0;
    pub(in crate::nbd) const WRITE: u16 = 1;
    pub(in crate::nbd) const DISCONNECT: u16 = 2;
    pub(in crate::nbd) const FLUSH: u16 = 3;
    pub(in crate::nbd) const TRIM: u16 = 4;
    pub(in crate::nbd) const WRITE_ZEROES: u16 = 6;
    pub(in crate::nbd) const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub(super) mod flag {
    /// Of any command: what is written is in memory when the reply is sent, and more is not promised.
    pub(in crate::nbd) const FUA: u16 = 1;
    pub(in crate::nbd) const NO_HOLE: u16 = 2;
    pub(in crate::nbd) const DF: u16 = 4;
    pub(in crate::nbd) const REQ_ONE: u16 = 8;
}

/// Types of chunks of structured replies, and the flag of the last one.
pub(super) mod chunk {
    pub(in crate::nbd) const DONE: u16 = 1;
    pub(in crate::nbd) const NONE: u16 = 0;
    pub(in crate::nbd) const OFFSET_DATA: u16 = 1;
    pub(in crate::nbd) const OFFSET_HOLE: u16 = 2;
    pub(in crate::nbd) const BLOCK_STATUS: u16 = 5;
    pub(in crate::nbd) const ERROR: u16 = (1 << 15) + 1;
}

/// Errors that a reply may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Errno {
    Io = 5,
    Invalid = 22,
    NoSpace = 28,
}

/// A request as it was received, without FUA. Nothing of it is checked yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) flags: u16,
    pub(super) command: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) length: u32,
}

impl Request {
    /// Bytes of a request without payload.
    pub(super) const BYTES: usize = 28;

    /// Reads a request.
    ///
    /// # Errors
    ///
    /// `InvalidData` if it does not begin with the magic number: what follows cannot be understood.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Request> {
        if read_u32(from)? != REQUEST_MAGIC {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Request {
            flags: read_u16(from)? & !flag::FUA,
            command: read_u16(from)?,
            cookie: read_u64(from)?,
            offset: read_u64(from)?,
            length: read_u32(from)?,
        })
    }
}

pub(super) fn read_u16(from: &mut impl Read) -> io::Result<u16> {
    let mut bytes = [0; 2];
    from.read_exact(&mut bytes)?;
    Ok(u16::from_be_bytes(bytes))
}

pub(super) fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_be_bytes(bytes))
}

pub(super) fn read_u64(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_be_bytes(bytes))
}

/// Reads and drops bytes.
pub(super) fn skip(from: &mut impl Read, bytes: u64) -> io::Result<()> {
    let skipped = io::copy(&mut from.take(bytes), &mut io::sink())?;
    if skipped == bytes {
        Ok(())
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Writes the header of a simple reply.
pub(super) fn write_simple(to: &mut impl Write, cookie: u64, errno: u32) -> io::Result<()> {
    to.write_all(&SIMPLE_REPLY_MAGIC.to_be_bytes())?;
    to.write_all(&errno.to_be_bytes())?;
    to.write_all(&cookie.to_be_bytes())
}

/// Writes the header of a chunk of a structured reply.
pub(super) fn write_chunk(
    to: &mut impl Write,
    cookie: u64,
    (flags, kind): (u16, u16),
    length: u32,
) -> io::Result<()> {
    to.write_all(&STRUCTURED_REPLY_MAGIC.to_be_bytes())?;
    to.write_all(&flags.to_be_bytes())?;
    to.write_all(&kind.to_be_bytes())?;
    to.write_all(&cookie.to_be_bytes())?;
    to.write_all(&length.to_be_bytes())
}
