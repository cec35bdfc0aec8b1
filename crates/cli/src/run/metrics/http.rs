//! One request of HTTP/1.1, bounded, and one answer, after which the connection ends.

use std::io::{ErrorKind, Read};
use std::time::Instant;

/// Bytes of a request's head at most. More lets clients send more headers.
const LONGEST_HEAD: usize = 8 << 10;
/// Headers of a request at most.
const MOST_HEADERS: usize = 64;

/// A request for the metrics.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// Whether the client takes OpenMetrics, and not only the older text format.
    pub accepts_openmetrics: bool,
}

/// Why a request gets no metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It is not HTTP.
    Malformed,
    /// It asks for something else.
    NotFound,
    /// It is not GET.
    Method,
    /// Its head is too long.
    TooLarge,
    /// It did not come in time.
    Slow,
}

impl Refusal {
    /// The status line's end.
    pub fn status(self) -> &'static str {
        match self {
            Refusal::Malformed => "400 Bad Request",
            Refusal::NotFound => "404 Not Found",
            Refusal::Method => "405 Method Not Allowed",
            Refusal::TooLarge => "431 Request Header Fields Too Large",
            Refusal::Slow => "408 Request Timeout",
        }
    }
}

/// Reads a request's head, until the deadline.
pub fn read_request(
    stream: &mut (impl Read + ?Sized),
    deadline: Instant,
) -> Result<Request, Refusal> {
    let mut head = Vec::new();
    let mut part = [0; 1024];
    loop {
        match stream.read(&mut part) {
            Ok(0) => return Err(Refusal::Malformed),
            Ok(length) => head.extend_from_slice(&part[..length]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return Err(Refusal::Slow),
        }
        if let Some(request) = parse(&head)? {
            return Ok(request);
        }
        if head.len() > LONGEST_HEAD {
            return Err(Refusal::TooLarge);
        }
        if Instant::now() >= deadline {
            return Err(Refusal::Slow);
        }
    }
}

/// A request; none while its head is not complete.
fn parse(head: &[u8]) -> Result<Option<Request>, Refusal> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(Refusal::TooLarge),
        Err(_) => return Err(Refusal::Malformed),
    }
    if request.method != Some("GET") {
        return Err(Refusal::Method);
    }
    let path = request.path.unwrap_or_default();
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    if path != "/metrics" {
        return Err(Refusal::NotFound);
    }
    let accepts = |header: &httparse::Header<'_>| {
        header.name.eq_ignore_ascii_case("accept")
            && header
                .value
                .windows(b"application/openmetrics-text".len())
                .any(|part| part.eq_ignore_ascii_case(b"application/openmetrics-text"))
    };
    Ok(Some(Request {
        accepts_openmetrics: request.headers.iter().any(accepts),
    }))
}

/// An answer.
pub fn answer(status: &str, content_type: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\
         X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn read(text: &[u8]) -> Result<Request, Refusal> {
        let mut stream = text;
        read_request(&mut stream, Instant::now() + Duration::from_secs(5))
    }

    #[test]
    fn requests_are_told_apart() {
        let plain = read(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
        let accepts_openmetrics = false;
        assert_eq!(
            plain,
            Ok(Request {
                accepts_openmetrics
            })
        );
        let open = b"GET /metrics?a=b HTTP/1.1\r\naccept: text/html, \
                     Application/OpenMetrics-text;version=1.0.0;q=0.5\r\n\r\n";
        assert!(read(open).unwrap().accepts_openmetrics);
        for (text, refusal) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], Refusal::NotFound),
            (b"POST /metrics HTTP/1.1\r\n\r\n", Refusal::Method),
            (b"\x16\x03\x01\x02\x00", Refusal::Malformed),
            (b"GET /metrics", Refusal::Malformed),
            (b"", Refusal::Malformed),
        ] {
            assert_eq!(read(text), Err(refusal), "{text:?}");
        }
    }

    #[test]
    fn a_request_has_bounds() {
        let mut long = b"GET /metrics HTTP/1.1\r\nx: ".to_vec();
        long.resize(20_000, b'a');
        assert_eq!(read(&long), Err(Refusal::TooLarge));
        let many = "a: b\r\n".repeat(MOST_HEADERS + 1);
        let many = format!("GET /metrics HTTP/1.1\r\n{many}\r\n");
        assert_eq!(read(many.as_bytes()), Err(Refusal::TooLarge));
        struct Slow;
        impl Read for Slow {
            fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
                std::thread::sleep(Duration::from_millis(10));
                buffer[0] = b'G';
                Ok(1)
            }
        }
        let began = Instant::now();
        let slow = read_request(&mut Slow, began + Duration::from_millis(50));
        assert!(matches!(slow, Err(Refusal::Slow | Refusal::Malformed)));
        assert!(began.elapsed() < Duration::from_secs(2));
    }
}
