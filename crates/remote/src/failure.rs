//! What the client's errors and the servers' mean.

use memfold_swap::RemoteError;
use redis::{ErrorKind, RedisError, Value};

/// What a command came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection failed; nothing is known of what was sent.
    Connection(RemoteError),
    /// The server answered that it will not. With `moved`, another one may.
    Answer { error: RemoteError, moved: bool },
}

impl Failure {
    pub(crate) fn error(self) -> RemoteError {
        match self {
            Self::Connection(error) | Self::Answer { error, .. } => error,
        }
    }
}

/// The meaning of a failed connection.
pub(crate) fn of_connection(error: &RedisError) -> Failure {
    if let ErrorKind::AuthenticationFailed = error.kind() {
        return Failure::Connection(RemoteError::Refused);
    }
    if let Some(code) = error.code() {
        return of_answer(code, error.detail());
    }
    Failure::Connection(RemoteError::Unavailable(if error.is_timeout() {
        "the store did not answer in time"
    } else if error.is_connection_refusal() {
        "the store refuses connections"
    } else {
        "the connection to the store failed"
    }))
}

/// The meaning of a server's error.
fn of_answer(code: &str, detail: Option<&str>) -> Failure {
    let (error, moved) = match code {
        "MOVED" | "ASK" => (
            RemoteError::Unavailable("the cluster moves the key to another server"),
            true,
        ),
        "CLUSTERDOWN" => (RemoteError::Unavailable("the cluster is down"), true),
        "READONLY" => (
            RemoteError::Unavailable("the server is a replica now"),
            true,
        ),
        "MASTERDOWN" | "TRYAGAIN" => (
            RemoteError::Unavailable("the server cannot answer now"),
            true,
        ),
        "LOADING" => (
            RemoteError::Unavailable("the server is loading its data"),
            false,
        ),
        "BUSY" => (RemoteError::Unavailable("the server runs a script"), false),
        "MISCONF" => (
            RemoteError::Unavailable("the server cannot save its data and takes none"),
            false,
        ),
        "NOREPLICAS" => (RemoteError::TooFewReplicas, false),
        "OOM" => (RemoteError::Full, false),
        "NOAUTH" | "WRONGPASS" | "NOPERM" => (RemoteError::Refused, false),
        _ if detail.is_some_and(|text| text.contains("max number of clients")) => (
            RemoteError::Unavailable("the server has too many clients"),
            false,
        ),
        _ => (
            RemoteError::Unavailable("the server answered with an error"),
            false,
        ),
    };
    Failure::Answer { error, moved }
}

/// What an `ASK` redirection says, if the value is one.
pub(crate) fn asks(value: &Value) -> Option<&str> {
    match value {
        Value::ServerError(error) if error.code() == "ASK" => error.details(),
        _ => None,
    }
}

/// The server's error, if the value is one.
pub(crate) fn of_value(value: &Value) -> Option<Failure> {
    match value {
        Value::ServerError(error) => Some(of_answer(error.code(), error.details())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_mean_what_the_tier_must_know() {
        let meaning = |code| of_answer(code, None);
        assert_eq!(meaning("OOM").error(), RemoteError::Full);
        assert_eq!(meaning("WRONGPASS").error(), RemoteError::Refused);
        assert_eq!(meaning("NOREPLICAS").error(), RemoteError::TooFewReplicas);
        for (code, other) in [("MOVED", true), ("READONLY", true), ("LOADING", false)] {
            let Failure::Answer { moved, .. } = meaning(code) else {
                panic!("{code}");
            };
            assert_eq!(moved, other, "{code}");
        }
    }
}
