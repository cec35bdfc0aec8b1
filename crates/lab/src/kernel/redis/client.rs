//! A pipelining client for the commands of the Redis protocol that a run needs.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    ops::Range,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

/// Commands per round trip. More need larger buffers on both sides.
const BATCH: usize = 500;
/// How long a reply or a background save may take before the run fails.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Interval at which the server is asked whether its background save goes on. A smaller value slows a
/// load beside it down; a larger one makes the time of the save less accurate.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A connection to a server.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    /// Connects to 127.0.0.1.
    pub fn connect(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Sends a command without arguments and returns its simple-string reply.
    pub fn status(&mut self, command: &str) -> Result<String> {
        self.send(&[vec![command.as_bytes()]])?;
        let line = self.line()?;
        let status = line.strip_prefix('+');
        Ok(status
            .with_context(|| format!("{command}: {line}"))?
            .to_owned())
    }

    /// SETs every key below `count`.
    pub fn fill(&mut self, count: usize, value: impl Fn(usize) -> Vec<u8>) -> Result<()> {
        for batch in batches(count) {
            let pairs: Vec<_> = batch.map(|index| (key(index), value(index))).collect();
            let commands: Vec<_> = pairs
                .iter()
                .map(|(key, value)| vec![&b"SET"[..], key, value])
                .collect();
            self.send(&commands)?;
            for _ in &pairs {
                let line = self.line()?;
                ensure!(line == "+OK", "SET: {line}");
            }
        }
        Ok(())
    }

    /// GETs every key below `count` and counts wrong values.
    pub fn wrong_keys(&mut self, count: usize, value: impl Fn(usize) -> Vec<u8>) -> Result<usize> {
        let mut wrong = 0;
        for batch in batches(count) {
            let batch: Vec<usize> = batch.collect();
            wrong += self.wrong_among(&batch, &value)?;
        }
        Ok(wrong)
    }

    /// GETs these keys in one round trip and counts wrong values.
    pub fn wrong_among(
        &mut self,
        indices: &[usize],
        value: impl Fn(usize) -> Vec<u8>,
    ) -> Result<usize> {
        let keys: Vec<_> = indices.iter().copied().map(key).collect();
        let commands: Vec<_> = keys.iter().map(|key| vec![&b"GET"[..], key]).collect();
        self.send(&commands)?;
        let mut wrong = 0;
        for &index in indices {
            if self.bulk()?.as_deref() != Some(&value(index)[..]) {
                wrong += 1;
            }
        }
        Ok(wrong)
    }

    /// Waits until the background save has succeeded.
    pub fn wait_for_save(&mut self) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.send(&[vec![&b"INFO"[..], b"persistence"]])?;
            let info = self.bulk()?.context("INFO returned null")?;
            let info = String::from_utf8_lossy(&info).into_owned();
            if info.contains("rdb_bgsave_in_progress:0") {
                ensure!(
                    info.contains("rdb_last_bgsave_status:ok"),
                    "redis-server: the background save failed"
                );
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "redis-server: the background save did not finish within {} s",
                TIMEOUT.as_secs()
            );
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Shuts the server down without a save.
    pub fn shut_down(mut self) -> Result<()> {
        self.send(&[vec![b"SHUTDOWN", b"NOSAVE"]])
    }

    fn send(&mut self, commands: &[Vec<&[u8]>]) -> Result<()> {
        let mut bytes = Vec::new();
        for words in commands {
            write!(bytes, "*{}\r\n", words.len())?;
            for word in words {
                write!(bytes, "${}\r\n", word.len())?;
                bytes.extend_from_slice(word);
                bytes.extend_from_slice(b"\r\n");
            }
        }
        Ok(self.stream.get_mut().write_all(&bytes)?)
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        ensure!(line.ends_with("\r\n"), "redis-server closed the connection");
        Ok(line.trim_end().to_owned())
    }

    fn bulk(&mut self) -> Result<Option<Vec<u8>>> {
        let line = self.line()?;
        let Some(length) = line.strip_prefix('$') else {
            bail!("redis-server replied {line:?} instead of a bulk string");
        };
        let Ok(length) = length.parse::<usize>() else {
            return Ok(None);
        };
        let mut value = vec![0; length + 2];
        self.stream.read_exact(&mut value)?;
        value.truncate(length);
        Ok(Some(value))
    }
}

fn batches(count: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count)
        .step_by(BATCH)
        .map(move |first| first..(first + BATCH).min(count))
}

/// The key name that redis-benchmark uses.
fn key(index: usize) -> Vec<u8> {
    format!("key:{index:012}").into_bytes()
}
