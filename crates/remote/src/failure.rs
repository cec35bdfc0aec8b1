//! What the client's errors and the servers' mean.

use std::io;

use memfold_swap::RemoteError;
use redis::{ServerError, Value};

use crate::answer::AnswerError;

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

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionError {
    /// The server does not know the user, or the password is another.
    #[error("it refuses the user or password")]
    Refused,
    /// The server answered with an error.
    #[error("{0}")]
    Server(ServerError),
    /// The network failed, or there is no answer that may be one.
    #[error(transparent)]
    Answer(#[from] AnswerError),
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Answer(error.into())
    }
}

impl ConnectionError {
    /// The error that a server answers to `AUTH` with.
    pub(crate) fn of_auth(error: ServerError) -> Self {
        if has_too_many_clients(error.details()) {
            Self::Server(error)
        } else {
            Self::Refused
        }
    }

    /// Whether the other side has closed the connection, as a server that restarts does.
    pub(crate) fn is_hung_up(&self) -> bool {
        match self {
            Self::Answer(AnswerError::Io(error)) => error.kind() != io::ErrorKind::TimedOut,
            _ => false,
        }
    }
}

/// The meaning of a failed connection.
pub(crate) fn of_connection(error: &ConnectionError) -> Failure {
    let reason = match error {
        ConnectionError::Refused => return Failure::Connection(RemoteError::Refused),
        ConnectionError::Server(error) => return of_answer(error.code(), error.details()),
        ConnectionError::Answer(AnswerError::TooLong) => {
            "the store's answer is longer than what was asked for"
        }
        ConnectionError::Answer(AnswerError::Garbled) => "the store's answer is not understood",
        ConnectionError::Answer(AnswerError::Io(error)) => match error.kind() {
            io::ErrorKind::TimedOut => "the store did not answer in time",
            io::ErrorKind::ConnectionRefused => "the store refuses connections",
            _ => "the connection to the store failed",
        },
    };
    Failure::Connection(RemoteError::Unavailable(reason))
}

fn has_too_many_clients(detail: Option<&str>) -> bool {
    detail.is_some_and(|text| text.contains("max number of clients"))
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
        _ if has_too_many_clients(detail) => (
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
