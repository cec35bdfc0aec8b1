//! The protocol, by a client that says each byte itself.

mod common;
mod memory_file;
mod packing;

use common::{disk, noise, wait_until};
use memfold_disk::BLOCK;
use memfold_disk::nbd::{Connection, MOST_CONNECTIONS, Server};
use memfold_swap::Scratch;
use memfold_testing::Random;
use memory_file::{MemoryFile, disk_with, write_noise};
use packing::{packing_disk, related};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zsmalloc::HeapSource;

const SIZE: u64 = 64 << 20;

fn server() -> Server<HeapSource> {
    Server::new(Arc::new(disk(SIZE, 16 << 20)))
}

/// A client after its greeting.
struct Client(UnixStream);

impl Client {
    fn connect(server: &Server<HeapSource>) -> Client {
        let (own, other) = UnixStream::pair().expect("a pair of sockets");
        own.set_read_timeout(Some(Duration::from_secs(20)))
            .expect("a timeout");
        server
            .welcome(Connection::Unix(other))
            .expect("a connection");
        let mut client = Client(own);
        assert_eq!(client.take(16), *b"NBDMAGICIHAVEOPT");
        assert_eq!(client.take(2), [0, 3]);
        client
    }

    fn say(&mut self, bytes: impl AsRef<[u8]>) {
        self.0
            .write_all(bytes.as_ref())
            .expect("the server listens");
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.0.read_exact(&mut bytes).expect("the server speaks");
        bytes
    }

    fn number(&mut self, bytes: usize) -> u64 {
        self.take(bytes)
            .iter()
            .fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn option(&mut self, number: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.say(b"IHAVEOPT");
        self.say(number.to_be_bytes());
        self.say((data.len() as u32).to_be_bytes());
        self.say(data);
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.number(8), 0x0003_e889_0455_65a9);
            assert_eq!(self.number(4), u64::from(number));
            let (kind, length) = (self.number(4) as u32, self.number(4) as usize);
            replies.push((kind, self.take(length)));
            if kind == 1 || kind >> 31 == 1 {
                return replies;
            }
        }
    }

    /// In transmission, with structured replies and block status.
    fn ready(server: &Server<HeapSource>) -> Client {
        let mut client = Client::connect(server);
        client.say([0, 0, 0, 3]);
        assert_eq!(client.option(8, &[]), [(1, vec![])]);
        let mut query = vec![0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 15];
        query.extend(b"base:allocation");
        assert_eq!(client.option(10, &query).len(), 2);
        client.go();
        client
    }

    fn go(&mut self) {
        let replies = self.option(7, &[0; 6]);
        let kinds: Vec<u32> = replies.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [3, 3, 1]);
        assert_eq!(replies[0].1[2..10], SIZE.to_be_bytes());
        assert_eq!(replies[0].1[11] & 128, 128, "DF");
    }

    fn request(&mut self, command: u16, flags: u16, offset: u64, length: u32) {
        self.say(request(command, flags, offset, length));
    }

    /// The chunks of a reply: type and contents.
    fn chunks(&mut self) -> Vec<(u64, Vec<u8>)> {
        let mut chunks = Vec::new();
        loop {
            assert_eq!(self.number(4), 0x668e_33ef);
            let (flags, kind) = (self.number(2), self.number(2));
            assert_eq!(self.number(8), 7);
            let length = self.number(4) as usize;
            chunks.push((kind, self.take(length)));
            if flags == 1 {
                return chunks;
            }
        }
    }

    fn errno(&mut self) -> u64 {
        match self.chunks().as_slice() {
            [(0, none)] if none.is_empty() => 0,
            [(0x8001, error)] => u64::from(u32::from_be_bytes(
                error[..4].try_into().expect("four bytes"),
            )),
            other => panic!("{other:?}"),
        }
    }
}

fn request(command: u16, flags: u16, offset: u64, length: u32) -> Vec<u8> {
    let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
    request.extend(flags.to_be_bytes());
    request.extend(command.to_be_bytes());
    request.extend(7_u64.to_be_bytes());
    request.extend(offset.to_be_bytes());
    request.extend(length.to_be_bytes());
    request
}

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const BLOCK_STATUS: u16 = 7;

#[test]
fn data_comes_back_and_holes_are_told() {
    let server = server();
    let mut client = Client::ready(&server);
    let data: Vec<u8> = (0..12_000_u32).map(|byte| (byte / 7) as u8).collect();
    client.request(WRITE, 0, 10_000, data.len() as u32);
    client.say(&data);
    assert_eq!(client.errno(), 0);
    client.request(READ, 0, 0, 64 << 10);
    let mut bytes = vec![0xaa; 64 << 10];
    let mut holes = 0;
    for (kind, chunk) in client.chunks() {
        let offset = u64::from_be_bytes(chunk[..8].try_into().expect("eight bytes")) as usize;
        if kind == 1 {
            bytes[offset..][..chunk.len() - 8].copy_from_slice(&chunk[8..]);
        } else {
            assert_eq!(kind, 2);
            let length = u32::from_be_bytes(chunk[8..].try_into().expect("four bytes")) as usize;
            bytes[offset..][..length].fill(0);
            holes += length;
        }
    }
    assert!(bytes[10_000..22_000] == data && bytes[..10_000].iter().all(|byte| *byte == 0));
    assert!(bytes[22_000..].iter().all(|byte| *byte == 0));
    assert_eq!(holes, 8192 + (64 << 10) - 24_576);
    // In one piece where it must be.
    client.request(READ, 4, 0, 64 << 10);
    assert_eq!(client.chunks()[0].1[8..], bytes);
    // Across the buffer's end, too.
    client.request(READ, 4, (256 << 10) - 5000, 10_000);
    assert_eq!(client.chunks().len(), 1);
    client.request(READ, 4, 0, 1 << 20);
    assert_eq!(client.chunks()[0].1[8..][..64 << 10], bytes);
    client.request(BLOCK_STATUS, 0, 0, 8 << 20);
    let status = client.chunks();
    let words: Vec<u32> = status[0]
        .1
        .chunks(4)
        .map(|word| u32::from_be_bytes(word.try_into().expect("four bytes")))
        .collect();
    assert_eq!(words, [1, 8192, 3, 16384, 0, (8 << 20) - 24_576, 3]);
    client.request(WRITE_ZEROES, 2, 8192, 4096);
    assert_eq!(client.errno(), 0);
    client.request(BLOCK_STATUS, 8, 8192, 8192);
    assert_eq!(client.chunks()[0].1[4..], [0, 0, 16, 0, 0, 0, 0, 2]);
    for command in [FLUSH, TRIM] {
        client.request(command, 1, 0, if command == TRIM { 32 << 20 } else { 0 });
        assert_eq!(client.errno(), 0);
    }
    client.request(READ, 0, 10_000, 12_000);
    assert!(client.chunks().iter().all(|(kind, _)| *kind == 2));
}

#[test]
fn simple_replies_and_the_oldest_negotiation_work() {
    let server = server();
    let mut client = Client::connect(&server);
    client.say([0, 0, 0, 1]);
    client.say(b"IHAVEOPT");
    client.say([0, 0, 0, 1, 0, 0, 0, 0]);
    assert_eq!(client.number(8), SIZE);
    // Without structured replies there is no DF.
    assert_eq!(client.number(2) & 128, 0);
    client.take(124);
    for (length, byte) in [(100_u32, 1_u8), (1 << 20, 2)] {
        client.request(WRITE, 0, 5, length);
        client.say(vec![byte; length as usize]);
        assert_eq!(
            (client.number(4), client.number(4), client.number(8)),
            (0x6744_6698, 0, 7)
        );
        client.request(READ, 0, 5, length);
        assert_eq!(
            (client.number(4), client.number(4), client.number(8)),
            (0x6744_6698, 0, 7)
        );
        assert!(client.take(length as usize).iter().all(|one| *one == byte));
    }
    client.request(READ, 0, SIZE, 1);
    assert_eq!((client.number(4), client.number(4)), (0x6744_6698, 22));
}

#[test]
fn what_makes_no_sense_is_refused_and_the_next_request_served() {
    let server = server();
    let mut client = Client::ready(&server);
    let refused = [
        (READ, 0, SIZE - 1, 2, 22),
        (READ, 0x8000, 0, 1, 22),
        (READ, 0, u64::MAX, u32::MAX, 22),
        (READ, 0, 0, (32 << 20) + 1, 22),
        (TRIM, 0, SIZE, 1, 22),
        (TRIM, 2, 0, 1, 22),
        (WRITE_ZEROES, 0, SIZE, 1, 28),
        (BLOCK_STATUS, 0, 0, 0, 22),
        (5, 0, 0, 1, 22),
        (999, 0, 0, 0, 22),
    ];
    for (command, flags, offset, length, errno) in refused {
        client.request(command, flags, offset, length);
        assert_eq!(client.errno(), errno, "command {command} at {offset}");
    }
    client.request(WRITE, 0, SIZE - 10, 20);
    client.say([1; 20]);
    assert_eq!(client.errno(), 28);
    client.request(READ, 0, SIZE - 10, 10);
    assert!(
        client
            .chunks()
            .iter()
            .all(|(_, chunk)| chunk[8..].iter().all(|byte| *byte == 0))
    );
}

/// Clients may set it anywhere.
#[test]
fn fua_is_accepted_with_every_command() {
    const FUA: u16 = 1;
    let server = server();
    let mut client = Client::ready(&server);
    client.request(WRITE, FUA, 0, 10);
    client.say([7; 10]);
    assert_eq!(client.errno(), 0);
    for command in [FLUSH, TRIM, WRITE_ZEROES] {
        client.request(command, FUA, 4096, 4096);
        assert_eq!(client.errno(), 0, "{command}");
    }
    client.request(BLOCK_STATUS, FUA, 0, 4096);
    assert!(client.chunks().iter().all(|(kind, _)| *kind == 5));
    client.request(READ, FUA, 0, 10);
    let chunks = client.chunks();
    assert_eq!(chunks[0].1[8..], [7; 10]);
}

#[test]
fn a_full_disk_says_so_and_goes_on() {
    let server = server();
    let mut client = Client::ready(&server);
    let mut random = memfold_testing::Random::new(1);
    let (mut full, mut written) = (false, 0_u64);
    for piece in 0..40_u64 {
        let data: Vec<u8> = (0..1 << 20).map(|_| random.below(256) as u8).collect();
        client.request(WRITE, 0, piece << 20, 1 << 20);
        client.say(&data);
        match client.errno() {
            0 => written += 1,
            28 => full = true,
            other => panic!("{other}"),
        }
    }
    assert!(full && written > 8, "{written}");
    client.request(TRIM, 0, 0, 40 << 20);
    assert_eq!(client.errno(), 0);
    client.request(WRITE, 0, 0, BLOCK as u32);
    client.say([3; BLOCK as usize]);
    assert_eq!(client.errno(), 0);
}

#[test]
fn clients_that_misbehave_are_hung_up_on_and_harm_no_other() {
    let server = server();
    let mut good = Client::ready(&server);
    let rubbish: [&[u8]; 4] = [
        b"GET / HTTP/1.0\r\n\r\n",
        &[0xff; 64],
        &[0, 0, 0, 3, 1, 2, 3, 4, 5, 6, 7, 8],
        &[0, 0, 0, 0],
    ];
    for bytes in rubbish {
        let mut bad = Client::connect(&server);
        bad.say(bytes);
        assert_eq!(bad.0.read(&mut [0; 1]).unwrap_or(0), 0, "{bytes:?}");
    }
    // A magic number that is none, and an end in the middle of a request.
    let mut bad = Client::ready(&server);
    bad.say([1; 28]);
    assert_eq!(bad.0.read(&mut [0; 1]).unwrap_or(0), 0);
    let mut bad = Client::ready(&server);
    bad.request(WRITE, 0, 0, 1 << 20);
    bad.say([9; 5000]);
    drop(bad);
    // A client that sends requests and takes no reply.
    let mut stalls = Client::ready(&server);
    stalls.0.set_nonblocking(true).expect("a mode");
    stalls.0.set_write_timeout(None).expect("a timeout");
    let mut request = Vec::new();
    for part in [
        &0x2560_9513_u32.to_be_bytes()[..],
        &[0; 4],
        &[0; 8],
        &[0; 8],
        &[0, 16, 0, 0],
    ] {
        request.extend(part);
    }
    while stalls.0.write(&request).is_ok() {}
    good.request(READ, 0, 1 << 20, 10);
    assert_eq!(good.chunks().len(), 1);
    // And more than there may be.
    let held: Vec<_> = (0..MOST_CONNECTIONS + 10)
        .map(|_| UnixStream::pair().expect("a pair of sockets"))
        .collect();
    let mut kept = Vec::new();
    let mut refused = 0;
    for (own, other) in held {
        refused += usize::from(server.welcome(Connection::Unix(other)).is_err());
        kept.push(own);
    }
    assert!(refused >= 10 && server.connections() <= MOST_CONNECTIONS);
    good.request(READ, 0, 1 << 20, 10);
    assert_eq!(good.chunks().len(), 1);
}

fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|one| one.trim_end() == name).count()
}

#[test]
fn slow_reads_that_came_together_are_shared_and_answered_in_order() {
    const BLOCKS: u64 = 1024;
    let disk = packing_disk(SIZE, 1 << 30);
    let disk = Arc::new(disk);
    let mut scratch = Scratch::new();
    for block in (0..BLOCKS).filter(|block| block % 64 != 5) {
        let written = disk.write(block * BLOCK, &related(block), &mut scratch);
        written.expect("there is room");
    }
    wait_until("most are packed", || {
        disk.usage().packed_blocks >= BLOCKS * 3 / 4
    });
    let server = Server::new(Arc::clone(&disk));
    let mut client = Client::ready(&server);
    let mut random = Random::new(1);
    for _ in 0..200 {
        let asked: Vec<(u64, u32)> = (0..32)
            .map(|_| {
                let offset = random.next_word() % (BLOCKS * BLOCK);
                let whole = !random.next_word().is_multiple_of(4);
                let offset = if whole {
                    offset / BLOCK * BLOCK
                } else {
                    offset
                };
                // The disk ends elsewhere, so all are inside.
                (offset, 1 + (random.next_word() % (2 * BLOCK)) as u32)
            })
            .collect();
        for (index, (offset, length)) in asked.iter().enumerate() {
            client.request(READ, u16::from(index % 5 == 0) << 2, *offset, *length);
            if index % 16 == 9 {
                client.request(READ, 0, SIZE, 1);
            }
        }
        for (index, (offset, length)) in asked.iter().enumerate() {
            let mut data = Vec::new();
            for (kind, contents) in client.chunks() {
                match kind {
                    1 => data.extend_from_slice(&contents[8..]),
                    2 => {
                        let hole = u32::from_be_bytes(contents[8..].try_into().expect("a length"));
                        data.resize(data.len() + hole as usize, 0);
                    }
                    other => panic!("a chunk of type {other:#x}"),
                }
            }
            let mut right = vec![0; *length as usize];
            disk.read(*offset, &mut right, &mut scratch)
                .expect("it is there");
            assert!(data == right, "{offset} {length}");
            let block = offset / BLOCK;
            if *length > 8 && offset % BLOCK == 0 && block % 64 != 5 && block < BLOCKS {
                assert_eq!(data[..8], related(block)[..8]);
            }
            if index % 16 == 9 {
                assert_eq!(client.errno(), 22);
            }
        }
    }
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus > 1 {
        assert!(
            threads_named("memfold-reads") > 0,
            "each read was served alone"
        );
    }
}

#[test]
fn reads_of_memory_do_not_wait_for_those_of_the_file_that_came_with_them() {
    let file = MemoryFile::default();
    let disk = Arc::new(disk_with(file.clone()));
    write_noise(&disk, 0..40, &mut Scratch::new());
    let server = Server::new(disk);
    let mut client = Client::ready(&server);
    let in_memory = 40 * 256 * BLOCK - BLOCK;
    let reads = [0, BLOCK, in_memory].map(|offset| request(READ, 0, offset, 4096));
    let held = file.reads.write().expect("no panic");
    client.say(reads.concat());
    let first = client.chunks().remove(0).1;
    assert_eq!(first[..8], in_memory.to_be_bytes());
    drop(held);
    for _ in 0..2 {
        let chunk = client.chunks().remove(0).1;
        let offset = u64::from_be_bytes(chunk[..8].try_into().expect("eight bytes"));
        assert!(noise(0, 2 * BLOCK as usize)[offset as usize..].starts_with(&chunk[8..]));
    }
}

/// As a read of the file has the lock of a leaf.
#[test]
fn a_reply_does_not_wait_for_a_change_beside_a_block_that_is_read() {
    let file = MemoryFile::default();
    let disk = Arc::new(disk_with(file.clone()));
    write_noise(&disk, 0..40, &mut Scratch::new());
    let server = Server::new(disk);
    let (mut reader, mut other) = (Client::ready(&server), Client::ready(&server));
    let in_memory = request(READ, 0, 40 * 256 * BLOCK - BLOCK, 4096);
    let change =
        |command, payload: usize| [request(command, 0, BLOCK, 4096), vec![1; payload]].concat();
    for change in [
        change(WRITE_ZEROES, 0),
        change(WRITE, 4096),
        change(TRIM, 0),
    ] {
        let held = file.reads.write().expect("no panic");
        reader.say(request(READ, 0, 0, 4096));
        // That it has begun shows in nothing.
        std::thread::sleep(Duration::from_millis(100));
        other.say([in_memory.clone(), change].concat());
        assert_eq!(other.chunks().len(), 1);
        drop(held);
        assert_eq!(reader.chunks().len(), 1);
        assert_eq!(other.errno(), 0);
    }
}

/// The client may send the rest only once it has the reply.
#[test]
fn a_reply_does_not_wait_for_the_payload_of_the_next_request() {
    let server = server();
    let mut client = Client::ready(&server);
    for (offset, errno) in [(0, 0), (SIZE, 28)] {
        let read = request(READ, 0, BLOCK, 4096);
        let write = request(WRITE, 0, offset, 4096);
        client.say([read, write, vec![1; 28]].concat());
        assert_eq!(client.chunks().len(), 1);
        client.say([1; 4096 - 28]);
        assert_eq!(client.errno(), errno);
    }
}

#[test]
fn a_reply_does_not_wait_for_room_that_the_next_request_needs() {
    let file = MemoryFile::default();
    let disk = Arc::new(disk_with(file.clone()));
    write_noise(&disk, 0..40, &mut Scratch::new());
    let server = Server::new(Arc::clone(&disk));
    let mut client = Client::ready(&server);
    let held = file.writes.write().expect("no panic");
    let before = disk.usage().writes;
    for block in 40 * 256.. {
        let read = request(READ, 0, 40 * 256 * BLOCK - BLOCK, 4096);
        let write = request(WRITE, 0, block * BLOCK, 4096);
        let data = noise(block, BLOCK as usize);
        client.say([read, write, data].concat());
        assert_eq!(client.chunks().len(), 1);
        let began = Instant::now();
        let is_written = || disk.usage().writes - before > block - 40 * 256;
        while !is_written() && began.elapsed() < Duration::from_millis(500) {
            std::thread::sleep(Duration::from_micros(100));
        }
        if !is_written() {
            break;
        }
        assert_eq!(client.errno(), 0);
    }
    drop(held);
    assert_eq!(client.errno(), 0);
}
