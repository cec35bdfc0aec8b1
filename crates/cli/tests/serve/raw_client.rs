//! A client that sends requests one by one.

use crate::support::Served;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

const READ: u16 = 0;
const WRITE: u16 = 1;

fn request(command: u16, offset: u64, length: usize) -> Vec<u8> {
    let mut request = 0x2560_9513_u32.to_be_bytes().to_vec();
    request.extend(0_u16.to_be_bytes());
    request.extend(command.to_be_bytes());
    // Any cookie will do.
    request.extend(offset.to_be_bytes());
    request.extend(offset.to_be_bytes());
    request.extend((length as u32).to_be_bytes());
    request
}

/// A connection with simple replies.
pub struct RawClient(UnixStream);

impl RawClient {
    /// Connects and negotiates (`NBD_OPT_EXPORT_NAME`).
    pub fn of(served: &Served) -> RawClient {
        let mut stream = UnixStream::connect(served.socket()).expect("it listens");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        // Fixed newstyle, no zeroes; then the default export.
        let mut hello = vec![0, 0, 0, 3];
        hello.extend(b"IHAVEOPT");
        hello.extend([0, 0, 0, 1, 0, 0, 0, 0]);
        stream.write_all(&hello).expect("it reads");
        let mut export = [0; 10];
        stream.read_exact(&mut export).expect("an export");
        RawClient(stream)
    }

    /// Begins to read these blocks of 4 KiB, by one system call: each takes room in the socket's buffer. The replies are
    /// left where they are.
    pub fn begin_reads(&mut self, blocks: std::ops::Range<u64>) {
        let requests = blocks.flat_map(|block| request(READ, block * 4096, 4096));
        let requests: Vec<u8> = requests.collect();
        self.0.write_all(&requests).expect("it reads");
    }

    /// Reads; what is there, or the error number of the reply.
    pub fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>, u32> {
        let sent = request(READ, offset, length);
        self.0.write_all(&sent).expect("it reads");
        match self.error_of_reply() {
            0 => {
                let mut data = vec![0; length];
                self.0.read_exact(&mut data).expect("data");
                Ok(data)
            }
            error => Err(error),
        }
    }

    /// Writes; the error number of the reply, or 0.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        let mut sent = request(WRITE, offset, data.len());
        sent.extend(data);
        self.0.write_all(&sent).expect("it reads");
        self.error_of_reply()
    }

    fn error_of_reply(&mut self) -> u32 {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).expect("a reply");
        u32::from_be_bytes([reply[4], reply[5], reply[6], reply[7]])
    }
}
