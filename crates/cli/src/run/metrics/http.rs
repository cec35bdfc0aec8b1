//! One request of HTTP/1.1, bounded, and one answer, after which the connection ends.

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
}

impl Refusal {
    /// The status line's end.
    pub fn status(self) -> &'static str {
        match self {
            Refusal::Malformed => "400 Bad Request",
            Refusal::NotFound => "404 Not Found",
            Refusal::Method => "405 Method Not Allowed",
            Refusal::TooLarge => "431 Request Header Fields Too Large",
        }
    }
}

/// A request's head, as it comes.
#[derive(Debug, Default)]
pub struct Head(Vec<u8>);

impl Head {
    /// Adds what came. Returns the request once its head is complete; nothing more of it is read.
    pub fn add(&mut self, part: &[u8]) -> Result<Option<Request>, Refusal> {
        self.0.extend_from_slice(part);
        match parse(&self.0)? {
            None if self.0.len() > LONGEST_HEAD => Err(Refusal::TooLarge),
            found => Ok(found),
        }
    }

    /// Whether nothing has come.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
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

    fn read(text: &[u8]) -> Result<Option<Request>, Refusal> {
        let mut head = Head::default();
        for byte in text {
            if let Some(request) = head.add(std::slice::from_ref(byte))? {
                return Ok(Some(request));
            }
        }
        Ok(None)
    }

    #[test]
    fn requests_are_told_apart() {
        let accepts = |accepts_openmetrics| {
            Ok(Some(Request {
                accepts_openmetrics,
            }))
        };
        let plain = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";
        assert_eq!(read(plain), accepts(false));
        let open = b"GET /metrics?a=b HTTP/1.1\r\naccept: text/html, \
                     Application/OpenMetrics-text;version=1.0.0;q=0.5\r\n\r\n";
        assert_eq!(read(open), accepts(true));
        for (text, refusal) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], Refusal::NotFound),
            (b"POST /metrics HTTP/1.1\r\n\r\n", Refusal::Method),
            (b"\x16\x03\x01\x02\x00", Refusal::Malformed),
        ] {
            assert_eq!(read(text), Err(refusal), "{text:?}");
        }
        for text in [&b"GET /metrics"[..], b""] {
            assert_eq!(read(text), Ok(None));
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
    }
}
