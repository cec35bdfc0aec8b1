//! The few words of Redis' protocol that a comparison needs, pipelined.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    ops::Range,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

const BATCH: usize = 500;
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to a server.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    pub fn connect(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// A command of one word, and the line it is answered with.
    pub fn status(&mut self, command: &str) -> Result<String> {
        self.send(&[vec![command.as_bytes()]])?;
        let line = self.line()?;
        let status = line.strip_prefix('+');
        Ok(status
            .with_context(|| format!("{command}: {line}"))?
            .to_owned())
    }

    /// Stores the value of every key below `count`.
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

    /// How many keys have another value than they should.
    pub fn wrong_keys(&mut self, count: usize, value: impl Fn(usize) -> Vec<u8>) -> Result<usize> {
        let mut wrong = 0;
        for batch in batches(count) {
            let keys: Vec<_> = batch.clone().map(key).collect();
            let commands: Vec<_> = keys.iter().map(|key| vec![&b"GET"[..], key]).collect();
            self.send(&commands)?;
            for index in batch {
                if self.bulk()?.as_deref() != Some(&value(index)[..]) {
                    wrong += 1;
                }
            }
        }
        Ok(wrong)
    }

    /// Waits until the background save has ended, and well.
    pub fn wait_for_save(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.send(&[vec![&b"INFO"[..], b"persistence"]])?;
            let info = self.bulk()?.context("INFO says nothing")?;
            let info = String::from_utf8_lossy(&info).into_owned();
            if info.contains("rdb_bgsave_in_progress:0") {
                ensure!(
                    info.contains("rdb_last_bgsave_status:ok"),
                    "the save failed"
                );
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the save does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends the server without a save.
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
        ensure!(line.ends_with("\r\n"), "the server closed the connection");
        Ok(line.trim_end().to_owned())
    }

    fn bulk(&mut self) -> Result<Option<Vec<u8>>> {
        let line = self.line()?;
        let Some(length) = line.strip_prefix('$') else {
            bail!("the server answers {line:?}");
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

/// The name that redis-benchmark gives to a key.
fn key(index: usize) -> Vec<u8> {
    format!("key:{index:012}").into_bytes()
}
