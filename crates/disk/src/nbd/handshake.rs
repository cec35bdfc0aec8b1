//! The negotiation, before the first request.

use super::wire::{
    ALLOCATION, ALLOCATION_ID, FIXED_NEWSTYLE, INFO_BLOCK_SIZE, INFO_EXPORT, INIT_MAGIC,
    MOST_BYTES, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, option, read_u16, read_u32, read_u64,
    reply, skip, transmission_flags,
};
use crate::disk::BLOCK;
use std::io::{self, Read, Write};

/// Options of one client, at most.
const MOST_OPTIONS: usize = 64;
/// Bytes of an option that are looked at. Export names have 4096 at most.
const MOST_OPTION_BYTES: u32 = 16 << 10;
/// Queries of metadata contexts in one option, at most.
const MOST_QUERIES: u32 = 64;

/// What client and server agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Agreed {
    /// Replies are structured.
    pub structured: bool,
    /// The client may ask which blocks are allocated.
    pub allocation: bool,
}

/// Why a negotiation ended without an agreement.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The connection failed or ended.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The client said what the protocol does not allow.
    #[error("the client does not speak the NBD protocol as it should: {0}")]
    Protocol(&'static str),
    /// The client asked for an export that there is not.
    #[error("the client asked for an export with a name; the only one has the empty name")]
    NoSuchExport,
    /// The client wanted to know something, and nothing more.
    #[error("the client ended the negotiation")]
    Ended,
}

/// Negotiates with a client. There is one export, of `size` bytes; its name is empty.
///
/// # Errors
///
/// If the client ends the negotiation, or breaks the protocol; the connection is to be closed.
pub fn negotiate(stream: &mut (impl Read + Write), size: u64) -> Result<Agreed, HandshakeError> {
    let mut greeting = Vec::new();
    greeting.extend(INIT_MAGIC.to_be_bytes());
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    stream.write_all(&greeting)?;
    let flags = read_u32(stream)?;
    let known = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
    if flags & !known != 0 || flags & u32::from(FIXED_NEWSTYLE) == 0 {
        return Err(HandshakeError::Protocol("unknown flags"));
    }
    let mut agreed = Agreed::default();
    for _ in 0..MOST_OPTIONS {
        if read_u64(stream)? != OPTION_MAGIC {
            return Err(HandshakeError::Protocol(
                "an option without its magic number",
            ));
        }
        let (number, length) = (read_u32(stream)?, read_u32(stream)?);
        if length > MOST_OPTION_BYTES {
            skip(stream, length.into())?;
            answer(stream, number, reply::TOO_BIG, &[])?;
            continue;
        }
        let mut data = vec![0; length as usize];
        stream.read_exact(&mut data)?;
        let mut option = Asked {
            stream,
            number,
            data: &data,
            size,
        };
        if number == option::EXPORT_NAME {
            let no_zeroes = flags & u32::from(NO_ZEROES) != 0;
            option.export(no_zeroes, &agreed)?;
            return Ok(agreed);
        }
        if option.answer(&mut agreed)? {
            return Ok(agreed);
        }
    }
    Err(HandshakeError::Protocol("too many options"))
}

/// Answers an option.
fn answer(to: &mut impl Write, number: u32, kind: u32, data: &[u8]) -> io::Result<()> {
    let mut reply = Vec::with_capacity(20 + data.len());
    reply.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    reply.extend(number.to_be_bytes());
    reply.extend(kind.to_be_bytes());
    reply.extend((data.len() as u32).to_be_bytes());
    reply.extend(data);
    to.write_all(&reply)
}

/// An option of the client.
struct Asked<'a, T> {
    stream: &'a mut T,
    number: u32,
    data: &'a [u8],
    size: u64,
}

impl<T: Read + Write> Asked<'_, T> {
    /// `EXPORT_NAME`, which has no reply where it fails.
    fn export(&mut self, no_zeroes: bool, agreed: &Agreed) -> Result<(), HandshakeError> {
        if !self.data.is_empty() {
            return Err(HandshakeError::NoSuchExport);
        }
        let mut reply = Vec::new();
        reply.extend(self.size.to_be_bytes());
        reply.extend(transmission_flags(agreed.structured).to_be_bytes());
        if !no_zeroes {
            reply.extend([0; 124]);
        }
        Ok(self.stream.write_all(&reply)?)
    }

    /// Answers all others. Returns whether requests follow.
    fn answer(&mut self, agreed: &mut Agreed) -> Result<bool, HandshakeError> {
        match self.number {
            option::ABORT => {
                self.reply(reply::ACK, &[])?;
                return Err(HandshakeError::Ended);
            }
            option::LIST if self.data.is_empty() => {
                // The length of the empty name.
                self.reply(reply::SERVER, &0_u32.to_be_bytes())?;
                self.reply(reply::ACK, &[])?;
            }
            option::STRUCTURED_REPLY if self.data.is_empty() => {
                agreed.structured = true;
                self.reply(reply::ACK, &[])?;
            }
            option::LIST | option::STRUCTURED_REPLY => self.reply(reply::INVALID, &[])?,
            option::INFO | option::GO => return self.inform(agreed),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.contexts(agreed)?,
            _ => self.reply(reply::UNSUPPORTED, &[])?,
        }
        Ok(false)
    }

    fn reply(&mut self, kind: u32, data: &[u8]) -> io::Result<()> {
        answer(self.stream, self.number, kind, data)
    }

    /// `INFO` and `GO`. Returns whether requests follow.
    fn inform(&mut self, agreed: &Agreed) -> Result<bool, HandshakeError> {
        let mut data = self.data;
        let Some(name) = read_text(&mut data) else {
            self.reply(reply::INVALID, &[])?;
            return Ok(false);
        };
        let Ok(count) = read_u16(&mut data) else {
            self.reply(reply::INVALID, &[])?;
            return Ok(false);
        };
        if data.len() != 2 * usize::from(count) {
            self.reply(reply::INVALID, &[])?;
            return Ok(false);
        }
        if !name.is_empty() {
            self.reply(reply::UNKNOWN, &[])?;
            return Ok(false);
        }
        let mut info = INFO_EXPORT.to_be_bytes().to_vec();
        info.extend(self.size.to_be_bytes());
        info.extend(transmission_flags(agreed.structured).to_be_bytes());
        self.reply(reply::INFO, &info)?;
        let mut info = INFO_BLOCK_SIZE.to_be_bytes().to_vec();
        for bytes in [1, BLOCK as u32, MOST_BYTES] {
            info.extend(bytes.to_be_bytes());
        }
        self.reply(reply::INFO, &info)?;
        self.reply(reply::ACK, &[])?;
        Ok(self.number == option::GO)
    }

    /// `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
    fn contexts(&mut self, agreed: &mut Agreed) -> Result<(), HandshakeError> {
        let sets = self.number == option::SET_META_CONTEXT;
        if sets {
            agreed.allocation = false;
        }
        let Some((name, queries)) = self.queries() else {
            self.reply(reply::INVALID, &[])?;
            return Ok(());
        };
        if sets && !agreed.structured {
            self.reply(reply::INVALID, &[])?;
            return Ok(());
        }
        if !name.is_empty() {
            self.reply(reply::UNKNOWN, &[])?;
            return Ok(());
        }
        let is_meant = |query: &&[u8]| *query == ALLOCATION || !sets && *query == b"base:";
        if queries.iter().any(is_meant) || !sets && queries.is_empty() {
            let mut context = if sets { ALLOCATION_ID } else { 0 }.to_be_bytes().to_vec();
            context.extend(ALLOCATION);
            self.reply(reply::META_CONTEXT, &context)?;
            agreed.allocation |= sets;
        }
        Ok(self.reply(reply::ACK, &[])?)
    }

    fn queries(&self) -> Option<(&[u8], Vec<&[u8]>)> {
        let mut data = self.data;
        let name = read_text(&mut data)?;
        let count = read_u32(&mut data)
            .ok()
            .filter(|count| *count <= MOST_QUERIES)?;
        let queries: Option<Vec<_>> = (0..count).map(|_| read_text(&mut data)).collect();
        queries
            .filter(|_| data.is_empty())
            .map(|queries| (name, queries))
    }
}

/// Takes a text with its length from the front.
fn read_text<'a>(data: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = read_u32(data).ok()? as usize;
    let (text, rest) = data.split_at_checked(length)?;
    *data = rest;
    Some(text)
}
