//! Reading a server's answers, in version 2 of its protocol, within the memory that the answer may take.
//!
//! Lengths are checked before anything is allocated for them.

use std::io::{self, Read};

use redis::{Value, parse_redis_value};

/// Bytes read at once. More makes fewer system calls for long answers, and takes more memory of each connection.
const BUFFER: usize = 16 << 10;
/// Levels of arrays in arrays: `CLUSTER SLOTS` has four.
const DEEPEST: u32 = 8;
/// Memory of a value beside its bytes.
const VALUE: usize = size_of::<Value>();

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AnswerError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("its answer is longer than what was asked for")]
    TooLong,
    #[error("its answer is not understood")]
    Garbled,
}

/// The most memory that an answer may take, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AnswerSize(usize);

impl AnswerSize {
    /// A number, a state, an error, or a few of them.
    pub(crate) const SHORT: Self = Self(4 << 10);
    /// A text or list about a server, such as that of `INFO` or `ROLE`.
    pub(crate) const TEXT: Self = Self(256 << 10);
    /// A cluster's slots, all of which may be ranges of their own.
    pub(crate) const SLOTS: Self = Self(16 << 20);

    /// So many strings of at most `bytes`.
    pub(crate) const fn strings(count: usize, bytes: usize) -> Self {
        Self(Self::SHORT.0 + count * (bytes + VALUE + "$4294967295\r\n\r\n".len()))
    }

    fn take(&mut self, bytes: usize) -> Result<(), AnswerError> {
        self.0 = self.0.checked_sub(bytes).ok_or(AnswerError::TooLong)?;
        Ok(())
    }
}

/// Reads answers from a stream.
pub(crate) struct AnswerReader<R> {
    from: R,
    buffer: Box<[u8]>,
    /// What of the buffer was read and not used.
    start: usize,
    end: usize,
}

impl<R: Read> AnswerReader<R> {
    pub(crate) fn new(from: R) -> Self {
        Self {
            from,
            buffer: vec![0; BUFFER].into(),
            start: 0,
            end: 0,
        }
    }

    /// What the answers are read from.
    pub(crate) fn stream(&mut self) -> &mut R {
        &mut self.from
    }

    /// Reads an answer of at most this size.
    pub(crate) fn read(&mut self, mut size: AnswerSize) -> Result<Value, AnswerError> {
        size.take(VALUE)?;
        self.value(&mut size, DEEPEST)
    }

    /// Reads a value whose own memory is taken from `left`.
    fn value(&mut self, left: &mut AnswerSize, deepest: u32) -> Result<Value, AnswerError> {
        let line = self.line(left)?;
        let text = line.get(1..line.len() - 2).ok_or(AnswerError::Garbled)?;
        match line[0] {
            b'+' if text == b"OK" => Ok(Value::Okay),
            b'+' => Ok(Value::SimpleString(
                String::from_utf8_lossy(text).into_owned(),
            )),
            b'-' => match parse_redis_value(&line) {
                Ok(error @ Value::ServerError(_)) => Ok(error),
                _ => Err(AnswerError::Garbled),
            },
            b':' => Ok(Value::Int(number(text)?)),
            b'$' => match length(text)? {
                None => Ok(Value::Nil),
                Some(bytes) => self.string(bytes, left),
            },
            b'*' => {
                let Some(count) = length(text)? else {
                    return Ok(Value::Nil);
                };
                let deepest = deepest.checked_sub(1).ok_or(AnswerError::Garbled)?;
                left.take(count.saturating_mul(VALUE))?;
                let mut values = Vec::with_capacity(count);
                for _ in 0..count {
                    values.push(self.value(left, deepest)?);
                }
                Ok(Value::Array(values))
            }
            _ => Err(AnswerError::Garbled),
        }
    }

    /// A line with its end, which is two bytes.
    fn line(&mut self, left: &mut AnswerSize) -> Result<Vec<u8>, AnswerError> {
        let mut line = Vec::new();
        loop {
            let found = self.filled()?;
            let end = found.iter().position(|byte| *byte == b'\n');
            let length = end.map_or(found.len(), |at| at + 1);
            left.take(length)?;
            line.extend_from_slice(&found[..length]);
            self.start += length;
            if end.is_some() {
                let is_whole = line.ends_with(b"\r\n");
                return is_whole.then_some(line).ok_or(AnswerError::Garbled);
            }
        }
    }

    fn string(&mut self, bytes: usize, left: &mut AnswerSize) -> Result<Value, AnswerError> {
        let whole = bytes.checked_add(2).ok_or(AnswerError::TooLong)?;
        left.take(whole)?;
        let mut string = vec![0; whole];
        let held = whole.min(self.end - self.start);
        string[..held].copy_from_slice(&self.buffer[self.start..self.start + held]);
        self.start += held;
        let mut done = held;
        while done < whole {
            // What follows the string is read with it.
            let found = self.filled()?;
            let length = found.len().min(whole - done);
            string[done..done + length].copy_from_slice(&found[..length]);
            self.start += length;
            done += length;
        }
        if !string.ends_with(b"\r\n") {
            return Err(AnswerError::Garbled);
        }
        string.truncate(bytes);
        Ok(Value::BulkString(string))
    }

    /// What was read and not used; at least one byte.
    fn filled(&mut self) -> Result<&[u8], AnswerError> {
        while self.start == self.end {
            let length = match self.from.read(&mut self.buffer) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(length) => length,
                Err(error) => return Err(error.into()),
            };
            (self.start, self.end) = (0, length);
        }
        Ok(&self.buffer[self.start..self.end])
    }
}

fn number(text: &[u8]) -> Result<i64, AnswerError> {
    let text = str::from_utf8(text).map_err(|_| AnswerError::Garbled)?;
    text.parse().map_err(|_| AnswerError::Garbled)
}

/// The length of a string or an array; `None` for what does not exist.
fn length(text: &[u8]) -> Result<Option<usize>, AnswerError> {
    match number(text)? {
        -1 => Ok(None),
        length => usize::try_from(length)
            .map(Some)
            .map_err(|_| AnswerError::Garbled),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what it is read from in pieces of one byte.
    struct Bytewise<'a>(&'a [u8]);

    impl Read for Bytewise<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let length = out.len().min(1);
            self.0.read(&mut out[..length])
        }
    }

    fn read(bytes: &[u8]) -> Result<Value, AnswerError> {
        let whole = AnswerReader::new(bytes).read(AnswerSize::SHORT);
        let bytewise = AnswerReader::new(Bytewise(bytes)).read(AnswerSize::SHORT);
        assert_eq!(whole.as_ref().ok(), bytewise.as_ref().ok());
        whole
    }

    #[test]
    fn answers_are_what_the_client_makes_of_them() {
        for bytes in [
            &b"+OK\r\n"[..],
            b"+QUEUED\r\n",
            b"-ERR no\r\n",
            b"-MOVED 1 a:2\r\n",
            b":-7\r\n",
            b"$0\r\n\r\n",
            b"$4\r\na\r\nb\r\n",
            b"$-1\r\n",
            b"*-1\r\n",
            b"*0\r\n",
            b"*3\r\n:1\r\n*1\r\n$1\r\nx\r\n-ERR\r\n",
        ] {
            assert_eq!(read(bytes).unwrap(), parse_redis_value(bytes).unwrap());
        }
    }

    #[test]
    fn several_answers_follow_each_other() {
        let mut reader = AnswerReader::new(&b"$1\r\na\r\n:5\r\n+OK\r\n"[..]);
        let mut next = || reader.read(AnswerSize::SHORT);
        assert_eq!(next().unwrap(), Value::BulkString(b"a".to_vec()));
        assert_eq!(next().unwrap(), Value::Int(5));
        assert_eq!(next().unwrap(), Value::Okay);
        assert!(matches!(next(), Err(AnswerError::Io(_))));
    }

    #[test]
    fn what_is_longer_than_asked_for_is_refused_before_it_is_read() {
        let deep = b"*1\r\n".repeat(50);
        let endless = vec![b'+'; 1 << 20];
        let many = [b"*100\r\n".to_vec(), b":1\r\n".repeat(100)].concat();
        for (bytes, is_refused) in [
            (&b"$536870912\r\n"[..], true),
            (b"$9223372036854775807\r\n", true),
            (b"*9223372036854775807\r\n", true),
            (b"*1000000\r\n", true),
            (&endless, true),
            (&many, size_of::<Value>() > 40),
        ] {
            let read = AnswerReader::new(bytes).read(AnswerSize::SHORT);
            assert_eq!(matches!(read, Err(AnswerError::TooLong)), is_refused);
        }
        let read = AnswerReader::new(&deep[..]).read(AnswerSize::SHORT);
        assert!(matches!(read, Err(AnswerError::Garbled)));
        // As long as what was asked for.
        let string = [b"$4116\r\n".to_vec(), vec![7; 4116], b"\r\n".to_vec()].concat();
        let strings = [b"*64\r\n".to_vec(), string.repeat(64)].concat();
        let size = AnswerSize::strings(64, 4116);
        assert!(AnswerReader::new(&strings[..]).read(size).is_ok());
        let size = AnswerSize::strings(60, 4116);
        let read = AnswerReader::new(&strings[..]).read(size);
        assert!(matches!(read, Err(AnswerError::TooLong)));
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        for bytes in [
            &b"\r\n"[..],
            b"\n",
            b"x\r\n",
            b"+a\n",
            b":\r\n",
            b":1 \r\n",
            b"$-2\r\n",
            b"$1\r\nabc",
            b"*-5\r\n",
            b"-\xff\r\n",
            b"%1\r\n+a\r\n+b\r\n",
        ] {
            assert!(
                matches!(read(bytes), Err(AnswerError::Garbled)),
                "{bytes:?}"
            );
        }
    }
}
