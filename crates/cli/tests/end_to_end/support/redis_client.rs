//! A Redis client of a few commands, with pipelines, so that every key can be compared.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

const BATCH: usize = 200;

/// A connection to a server.
pub struct RedisClient {
    reader: BufReader<TcpStream>,
}

/// What a server answers.
#[derive(Debug, PartialEq)]
pub enum Reply {
    Text(String),
    Error(String),
    Value(Option<Vec<u8>>),
}

impl RedisClient {
    /// Connects as soon as the server answers a PING; `None` after ten seconds.
    pub fn connect(port: u16) -> Option<Self> {
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                stream
                    .set_read_timeout(Some(Duration::from_secs(60)))
                    .expect("a timeout");
                stream.set_nodelay(true).expect("no delay");
                let mut client = Self {
                    reader: BufReader::new(stream),
                };
                if client.command(&[b"PING"]) == Reply::Text("PONG".to_owned()) {
                    return Some(client);
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        None
    }

    fn send(&mut self, commands: &[Vec<&[u8]>]) {
        let mut bytes = Vec::new();
        for words in commands {
            write!(bytes, "*{}\r\n", words.len()).expect("a vector");
            for word in words {
                write!(bytes, "${}\r\n", word.len()).expect("a vector");
                bytes.extend_from_slice(word);
                bytes.extend_from_slice(b"\r\n");
            }
        }
        self.reader
            .get_mut()
            .write_all(&bytes)
            .expect("the server reads");
    }

    fn reply(&mut self) -> Reply {
        let mut line = String::new();
        self.reader
            .read_line(&mut line)
            .expect("the server answers within a minute");
        assert!(line.ends_with("\r\n"), "the server closed the connection");
        let rest = line[1..].trim_end().to_owned();
        match line.as_bytes()[0] {
            b'-' => Reply::Error(rest),
            b'$' => {
                let Ok(length) = rest.parse::<usize>() else {
                    return Reply::Value(None);
                };
                let mut value = vec![0; length + 2];
                self.reader.read_exact(&mut value).expect("a whole value");
                value.truncate(length);
                Reply::Value(Some(value))
            }
            _ => Reply::Text(rest),
        }
    }

    /// One command and its answer.
    pub fn command(&mut self, words: &[&[u8]]) -> Reply {
        self.send(&[words.to_vec()]);
        self.reply()
    }

    /// Stores `value(index)` under each key of the range.
    pub fn fill(&mut self, keys: std::ops::Range<usize>, value: impl Fn(usize) -> Vec<u8>) {
        let all: Vec<usize> = keys.collect();
        for batch in all.chunks(BATCH) {
            let pairs: Vec<(Vec<u8>, Vec<u8>)> = batch
                .iter()
                .map(|&index| (key(index), value(index)))
                .collect();
            let commands: Vec<Vec<&[u8]>> = pairs
                .iter()
                .map(|(key, value)| vec![b"SET".as_slice(), key, value])
                .collect();
            self.send(&commands);
            for &index in batch {
                assert_eq!(
                    self.reply(),
                    Reply::Text("OK".to_owned()),
                    "SET of key {index}"
                );
            }
        }
    }

    /// Reads each key of the range back and compares it.
    pub fn verify(
        &mut self,
        when: &str,
        keys: std::ops::Range<usize>,
        value: impl Fn(usize) -> Vec<u8>,
    ) {
        let all: Vec<usize> = keys.collect();
        for batch in all.chunks(BATCH) {
            let names: Vec<Vec<u8>> = batch.iter().map(|&index| key(index)).collect();
            let commands: Vec<Vec<&[u8]>> = names
                .iter()
                .map(|name| vec![b"GET".as_slice(), name])
                .collect();
            self.send(&commands);
            for &index in batch {
                let found = self.reply();
                assert!(
                    found == Reply::Value(Some(value(index))),
                    "{when}: key {index} is not what was stored, but {found:?}"
                );
            }
        }
    }

    /// A field of INFO.
    pub fn info(&mut self, field: &str) -> String {
        let Reply::Value(Some(text)) = self.command(&[b"INFO"]) else {
            panic!("the server does not answer INFO");
        };
        let text = String::from_utf8_lossy(&text).into_owned();
        text.lines()
            .find_map(|line| {
                line.strip_prefix(field)?
                    .strip_prefix(':')
                    .map(str::to_owned)
            })
            .unwrap_or_else(|| panic!("INFO has no field {field}"))
    }

    /// Asks the server to end without saving.
    pub fn shut_down(mut self) {
        self.send(&[vec![b"SHUTDOWN", b"NOSAVE"]]);
    }
}

/// The name of a key.
fn key(index: usize) -> Vec<u8> {
    format!("key:{index:012}").into_bytes()
}

/// The value of a key: repeated phrases and a part of its own, about 2:1 compressible.
pub fn redis_value(index: usize) -> Vec<u8> {
    const PHRASE: &[u8] =
        b"session user account profile created updated expires region language product category ";
    let mut state = index as u64 ^ 0x9e37_79b9_7f4a_7c15;
    let length = 900 + index % 800;
    let mut bytes = Vec::with_capacity(length + 64);
    while bytes.len() < length {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let start = (state >> 40) as usize % (PHRASE.len() - 24);
        bytes.extend_from_slice(&PHRASE[start..start + 24]);
        bytes.extend_from_slice(format!("{:x},", state >> 24).as_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// What some keys are overwritten with.
pub fn later_value(index: usize) -> Vec<u8> {
    redis_value(index + 10_000_000)
}
