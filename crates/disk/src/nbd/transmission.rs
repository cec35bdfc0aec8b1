//! Requests and replies.

use super::BUFFER;
use super::handshake::Agreed;
use super::team::{self, MOST_READS, OneRead, Outcome, Team};
use super::wire::{
    ALLOCATION_ID, EXTENT_HOLE, EXTENT_ZERO, Errno, MOST_BYTES, Request, chunk, command, flag,
    skip, write_chunk, write_simple,
};
use crate::disk::{BLOCK, Disk};
use crate::error::DiskError;
use crate::pace::Pace;
use memfold_swap::Scratch;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use zsmalloc::PageSource;

/// Extents in one reply, at most.
const MOST_EXTENTS: usize = 1024;

/// Serves the requests of a client until it disconnects.
///
/// # Errors
///
/// If the connection fails or ends in the middle of a request, or the client sends what cannot be
/// understood.
pub fn transmit<S: PageSource + 'static>(
    disk: &Disk<S>,
    agreed: Agreed,
    from: impl Read,
    to: impl Write,
) -> io::Result<()> {
    transmit_beside(disk, None, agreed, (from, to))
}

/// The same with a team of the same disk, which shares slow reads.
pub(crate) fn transmit_beside<S: PageSource + 'static>(
    disk: &Disk<S>,
    team: Option<&Team<S>>,
    agreed: Agreed,
    (from, to): (impl Read, impl Write),
) -> io::Result<()> {
    let mut transmission = Transmission {
        disk,
        team,
        alone: 0,
        agreed,
        from: BufReader::with_capacity(BUFFER, from),
        to,
        replies: Vec::with_capacity(BUFFER),
        piece: vec![0; BUFFER],
        scratch: Scratch::new(),
    };
    while transmission.next()? {}
    Ok(())
}

struct Transmission<'a, S: PageSource + 'static, R, W> {
    disk: &'a Disk<S>,
    team: Option<&'a Team<S>>,
    /// Requests to come that need not be looked at: the team is not worth waking for them.
    alone: usize,
    agreed: Agreed,
    from: BufReader<R>,
    to: W,
    /// Replies that are not sent yet.
    replies: Vec<u8>,
    /// Data on its way in or out.
    piece: Vec<u8>,
    scratch: Scratch,
}

impl<S: PageSource + 'static, R: Read, W: Write> Transmission<'_, S, R, W> {
    /// Serves one request. `false` after the last.
    fn next(&mut self) -> io::Result<bool> {
        // Thousands may have come already, each of which may take long.
        if self.team.is_some_and(Team::is_ending) {
            return Ok(false);
        }
        self.send_before_read(Request::BYTES as u64)?;
        let request = match Request::read(&mut self.from) {
            // A client may leave without a word between two requests.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            request => request?,
        };
        match request.command {
            command::DISCONNECT => {
                self.send()?;
                return Ok(false);
            }
            command::READ => {
                if request.length <= MOST_BYTES {
                    self.send_if_waits(request, Disk::read_waits)?;
                }
                if !self.read_together(request)? {
                    self.read(request)?;
                }
            }
            command::WRITE => {
                let outcome = self.write(request)?;
                self.reply(request, outcome)?;
            }
            _ => {
                let waits = match request.command {
                    command::WRITE_ZEROES => Disk::zero_waits,
                    _ => Disk::change_waits,
                };
                self.send_if_waits(request, waits)?;
                let outcome = self.other(request);
                match outcome {
                    Ok(()) if request.command == command::BLOCK_STATUS => {
                        self.block_status(request)?;
                    }
                    outcome => self.reply(request, outcome)?,
                }
            }
        }
        if self.replies.len() >= BUFFER {
            self.send()?;
        }
        Ok(true)
    }

    fn send(&mut self) -> io::Result<()> {
        self.to.write_all(&self.replies)?;
        self.replies.clear();
        self.to.flush()
    }

    /// Sends replies before a wait for the client's next `bytes`: it may need them before it sends these.
    fn send_before_read(&mut self, bytes: u64) -> io::Result<()> {
        if (self.from.buffer().len() as u64) < bytes && !self.replies.is_empty() {
            self.send()?;
        }
        Ok(())
    }

    /// Sends replies before a request that may wait for the swap file, a store or room.
    fn send_if_waits(
        &mut self,
        request: Request,
        waits: impl Fn(&Disk<S>, &Range<u64>) -> bool,
    ) -> io::Result<()> {
        let range = self.disk.check(request.offset, request.length.into());
        if !self.replies.is_empty() && range.is_ok_and(|range| waits(self.disk, &range)) {
            self.send()?;
        }
        Ok(())
    }

    /// A reply without data.
    fn reply(&mut self, request: Request, outcome: Result<(), Errno>) -> io::Result<()> {
        let Request { cookie, .. } = request;
        if !self.agreed.structured {
            let errno = outcome.err().map_or(0, |errno| errno as u32);
            return write_simple(&mut self.replies, cookie, errno);
        }
        match outcome {
            Ok(()) => write_chunk(&mut self.replies, cookie, (chunk::DONE, chunk::NONE), 0),
            Err(errno) => {
                write_chunk(&mut self.replies, cookie, (chunk::DONE, chunk::ERROR), 6)?;
                self.replies.extend((errno as u32).to_be_bytes());
                // No text.
                self.replies.extend(0_u16.to_be_bytes());
                Ok(())
            }
        }
    }

    /// Commands without data. Whether a block status may be told.
    fn other(&mut self, request: Request) -> Result<(), Errno> {
        let Request { offset, length, .. } = request;
        let allowed = match request.command {
            command::FLUSH | command::TRIM => 0,
            command::WRITE_ZEROES => flag::NO_HOLE,
            command::BLOCK_STATUS => flag::REQ_ONE,
            _ => return Err(Errno::Invalid),
        };
        if request.flags & !allowed != 0 {
            return Err(Errno::Invalid);
        }
        match request.command {
            // What was written is in memory, and more is not promised.
            command::FLUSH => Ok(()),
            command::TRIM => self.disk.discard(offset, length.into()).map_err(errno_of),
            command::WRITE_ZEROES => {
                let keep = request.flags & flag::NO_HOLE != 0;
                self.disk
                    .zero(offset, length.into(), keep, &mut self.scratch)
                    .map_err(|error| match error {
                        DiskError::OutOfRange => Errno::NoSpace,
                        error => errno_of(error),
                    })
            }
            _ if !self.agreed.allocation || length == 0 => Err(Errno::Invalid),
            _ => {
                let range = self.disk.check(offset, length.into());
                range.map(drop).map_err(errno_of)
            }
        }
    }

    /// A write: the payload passes in pieces. All of it is read, whatever becomes of it.
    fn write(&mut self, request: Request) -> io::Result<Result<(), Errno>> {
        let Request { offset, length, .. } = request;
        let outcome = if request.flags != 0 || length > MOST_BYTES {
            Err(Errno::Invalid)
        } else {
            // Beyond the end of a disk there is no space.
            let range = self.disk.check(offset, length.into());
            range.map(drop).map_err(|_| Errno::NoSpace)
        };
        if let Err(errno) = outcome {
            self.skip(length.into())?;
            return Ok(Err(errno));
        }
        let end = offset + u64::from(length);
        let mut at = offset;
        while at < end {
            let length = piece_length(at, end);
            self.send_before_read(length as u64)?;
            self.from.read_exact(&mut self.piece[..length])?;
            let piece = Request {
                offset: at,
                length: length as u32,
                ..request
            };
            self.send_if_waits(piece, Disk::write_waits)?;
            let written = self
                .disk
                .write(at, &self.piece[..length], &mut self.scratch);
            at += length as u64;
            if let Err(error) = written {
                self.skip(end - at)?;
                return Ok(Err(errno_of(error)));
            }
        }
        Ok(Ok(()))
    }

    /// Reads and drops what is left of a payload.
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        self.send_before_read(bytes)?;
        skip(&mut self.from, bytes)
    }

    /// Serves a read, and those that came with it, side by side. `false` if it is served faster alone.
    fn read_together(&mut self, first: Request) -> io::Result<bool> {
        let Some(team) = self.team else {
            return Ok(false);
        };
        if self.alone > 0 {
            self.alone -= 1;
            return Ok(false);
        }
        let mut together = Vec::new();
        let (mut next, mut bytes) = (Some(first), 0);
        let mut rest = self.from.buffer();
        while let Some(request) = next
            && let Some(read) = self.one_read(request)
            && bytes + request.length as usize <= BUFFER
            && together.len() < MOST_READS
        {
            bytes += request.length as usize;
            together.push((request, read));
            // One that makes no sense is met where it is served.
            let has_come = rest.len() >= Request::BYTES;
            next = has_come.then(|| Request::read(&mut rest).ok()).flatten();
        }
        together.sort_by_key(|(_, read)| read.pace == Pace::Waits);
        let (requests, reads): (Vec<_>, Vec<_>) = together.into_iter().unzip();
        let Some(batch) = team.begin(&reads) else {
            self.alone = requests.len().saturating_sub(1);
            return Ok(false);
        };
        self.from.consume((requests.len() - 1) * Request::BYTES);
        batch.serve_quick(&mut self.scratch);
        if batch.waits() {
            loop {
                self.reply_to(&requests, batch.finished())?;
                self.send()?;
                if !batch.serve_one(&mut self.scratch) {
                    break;
                }
            }
        }
        while let outcomes = batch.wait()
            && !outcomes.is_empty()
        {
            self.reply_to(&requests, outcomes)?;
            if batch.waits() {
                self.send()?;
            }
        }
        Ok(true)
    }

    /// Replies to reads of a batch, by their indices.
    fn reply_to(
        &mut self,
        requests: &[Request],
        outcomes: Vec<(usize, Outcome)>,
    ) -> io::Result<()> {
        for (index, outcome) in outcomes {
            self.reply_with(requests[index], outcome)?;
        }
        Ok(())
    }

    /// The read of a request, if it can be served with others: its reply has one chunk.
    fn one_read(&self, request: Request) -> Option<OneRead> {
        let Request { offset, length, .. } = request;
        let allowed = if self.agreed.structured { flag::DF } else { 0 };
        let is_plain = request.command == command::READ
            && request.flags & !allowed == 0
            && (1..=team::MOST_BYTES).contains(&length);
        let range = self.disk.check(offset, length.into()).ok();
        let range = range.filter(|_| is_plain)?;
        let pace = self.disk.pace(&range)?;
        Some(OneRead { range, pace })
    }

    fn reply_with(&mut self, request: Request, outcome: Outcome) -> io::Result<()> {
        let data = match outcome {
            Some(Ok(data)) => data,
            Some(Err(error)) => return self.reply(request, Err(errno_of(error))),
            None => return self.reply(request, Err(Errno::Io)),
        };
        if self.agreed.structured {
            let kind = (chunk::DONE, chunk::OFFSET_DATA);
            let length = 8 + data.len() as u32;
            write_chunk(&mut self.replies, request.cookie, kind, length)?;
            self.replies.extend(request.offset.to_be_bytes());
        } else {
            write_simple(&mut self.replies, request.cookie, 0)?;
        }
        self.replies.extend_from_slice(&data);
        Ok(())
    }

    fn read(&mut self, request: Request) -> io::Result<()> {
        let Request {
            offset,
            length,
            flags,
            ..
        } = request;
        let structured = self.agreed.structured;
        let allowed = if structured { flag::DF } else { 0 };
        if flags & !allowed != 0 || length > MOST_BYTES {
            return self.reply(request, Err(Errno::Invalid));
        }
        if let Err(error) = self.disk.check(offset, length.into()) {
            return self.reply(request, Err(errno_of(error)));
        }
        if !structured {
            self.read_simple(request)
        } else if length == 0 {
            self.reply(request, Ok(()))
        } else {
            self.read_chunks(request)
        }
    }

    /// A simple reply: one error for all of it.
    fn read_simple(&mut self, request: Request) -> io::Result<()> {
        let Request {
            offset,
            length,
            cookie,
            ..
        } = request;
        let range = offset..offset + u64::from(length);
        let is_long = length as usize > BUFFER;
        let loaded = if is_long {
            self.try_to_load(range.clone())
        } else {
            self.load(offset, length as usize).map(drop)
        };
        if let Err(error) = loaded {
            return self.reply(request, Err(errno_of(error)));
        }
        write_simple(&mut self.replies, cookie, 0)?;
        if is_long {
            return self.send_contents(range);
        }
        self.replies
            .extend_from_slice(&self.piece[..length as usize]);
        Ok(())
    }

    /// Loads what no buffer holds, to see that it can be loaded, before the header of its reply is sent.
    fn try_to_load(&mut self, range: Range<u64>) -> Result<(), DiskError> {
        let mut at = range.start;
        while at < range.end {
            at += self.load(at, piece_length(at, range.end))? as u64;
        }
        Ok(())
    }

    /// Sends the contents of a range, and what was not sent before them.
    fn send_contents(&mut self, range: Range<u64>) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            // It could be loaded a moment ago, and its reply has begun.
            let length = self
                .load(at, piece_length(at, range.end))
                .map_err(io::Error::other)?;
            self.replies.extend_from_slice(&self.piece[..length]);
            self.send()?;
            at += length as u64;
        }
        Ok(())
    }

    /// Loads a piece into the buffer; returns its length.
    fn load(&mut self, at: u64, length: usize) -> Result<usize, DiskError> {
        let piece = &mut self.piece[..length];
        self.disk.read(at, piece, &mut self.scratch)?;
        Ok(length)
    }

    /// A structured reply: a chunk for each piece, and for each hole of a block or more, unless the client
    /// wants no fragments.
    fn read_chunks(&mut self, request: Request) -> io::Result<()> {
        let end = request.offset + u64::from(request.length);
        let whole = request.flags & flag::DF != 0;
        if whole && request.length as usize > BUFFER {
            return self.read_whole(request);
        }
        let mut at = request.offset;
        while at < end {
            let extent = self.disk.extent(at, end);
            let is_hole = extent.zero && extent.length >= BLOCK && !whole;
            let length = if whole {
                end - at
            } else if is_hole {
                extent.length
            } else {
                extent.length.min(piece_length(at, end) as u64)
            };
            let done = if at + length == end { chunk::DONE } else { 0 };
            if is_hole {
                let kind = (done, chunk::OFFSET_HOLE);
                write_chunk(&mut self.replies, request.cookie, kind, 12)?;
                self.replies.extend(at.to_be_bytes());
                self.replies.extend((length as u32).to_be_bytes());
            } else {
                if let Err(error) = self.load(at, length as usize) {
                    return self.reply(request, Err(errno_of(error)));
                }
                let kind = (done, chunk::OFFSET_DATA);
                write_chunk(&mut self.replies, request.cookie, kind, 8 + length as u32)?;
                self.replies.extend(at.to_be_bytes());
                self.replies
                    .extend_from_slice(&self.piece[..length as usize]);
            }
            at += length;
            if self.replies.len() >= BUFFER {
                self.send()?;
            }
        }
        Ok(())
    }

    /// One chunk that no buffer holds.
    fn read_whole(&mut self, request: Request) -> io::Result<()> {
        let range = request.offset..request.offset + u64::from(request.length);
        if let Err(error) = self.try_to_load(range.clone()) {
            return self.reply(request, Err(errno_of(error)));
        }
        let kind = (chunk::DONE, chunk::OFFSET_DATA);
        write_chunk(&mut self.replies, request.cookie, kind, 8 + request.length)?;
        self.replies.extend(range.start.to_be_bytes());
        self.send_contents(range)
    }

    fn block_status(&mut self, request: Request) -> io::Result<()> {
        let end = request.offset + u64::from(request.length);
        let most = if request.flags & flag::REQ_ONE != 0 {
            1
        } else {
            MOST_EXTENTS
        };
        let mut extents: Vec<(u32, u32)> = Vec::new();
        let mut at = request.offset;
        while at < end {
            let extent = self.disk.extent(at, end);
            let hole = if extent.hole { EXTENT_HOLE } else { 0 };
            let zero = if extent.zero { EXTENT_ZERO } else { 0 };
            at += extent.length;
            let count = extents.len();
            match extents.last_mut() {
                // Below the length of the request in sum.
                Some((length, flags)) if *flags == hole | zero => *length += extent.length as u32,
                _ if count == most => break,
                _ => extents.push((extent.length as u32, hole | zero)),
            }
        }
        let length = 4 + 8 * extents.len() as u32;
        let kind = (chunk::DONE, chunk::BLOCK_STATUS);
        write_chunk(&mut self.replies, request.cookie, kind, length)?;
        self.replies.extend(ALLOCATION_ID.to_be_bytes());
        for (length, flags) in extents {
            self.replies.extend(length.to_be_bytes());
            self.replies.extend(flags.to_be_bytes());
        }
        Ok(())
    }
}

/// Bytes of the piece at an offset: up to a multiple of the buffer's length, so that later pieces begin at
/// a block.
fn piece_length(at: u64, end: u64) -> usize {
    let buffer = BUFFER as u64;
    (end.min((at / buffer + 1) * buffer) - at) as usize
}

fn errno_of(error: DiskError) -> Errno {
    match error {
        DiskError::OutOfRange => Errno::Invalid,
        DiskError::NoSpace => Errno::NoSpace,
        DiskError::Load(error) => {
            static SAID: AtomicBool = AtomicBool::new(false);
            // A lost store has millions of blocks.
            if SAID.swap(true, Ordering::Relaxed) {
                log::debug!("a block of the disk cannot be read back: {error}");
            } else {
                log::error!(
                    "a block of the disk cannot be read back: {error}; further ones are counted (failed_reads of `memfold stat --json`)"
                );
            }
            Errno::Io
        }
    }
}
