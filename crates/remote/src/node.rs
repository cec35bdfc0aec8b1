//! Connections to one server.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use memfold_swap::RemoteError;
use redis::{Client, Connection, ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo, Value};

use crate::{
    address::Server,
    failure::{Failure, of_connection},
    options::Access,
};

/// The most idle connections kept to a server. More save connecting where many threads fault at once.
const IDLE: usize = 32;
/// How long a server that failed is left alone at first, and at most. Longer saves futile waits, and
/// finds later that it is back.
const FIRST_REST: Duration = Duration::from_millis(100);
const LONGEST_REST: Duration = Duration::from_secs(1);

#[derive(Default)]
struct State {
    idle: Vec<Connection>,
    /// Failures in a row.
    failures: u32,
    resting_until: Option<Instant>,
}

/// A server, and what is connected to it.
pub(crate) struct Node {
    client: Client,
    state: Mutex<State>,
}

/// Commands as they are sent, and the number of their answers.
#[derive(Default)]
pub(crate) struct Commands {
    bytes: Vec<u8>,
    answers: usize,
}

impl Commands {
    /// Appends a command with one answer.
    pub(crate) fn push(&mut self, command: &redis::Cmd) {
        command.write_packed_command(&mut self.bytes);
        self.answers += 1;
    }

    /// The number of answers.
    pub(crate) fn answers(&self) -> usize {
        self.answers
    }
}

/// Commands that were sent, until their answers are read. If it is dropped before, the connection is
/// closed: an answer that comes late is never taken for another's.
pub(crate) struct Exchange<'a> {
    node: &'a Node,
    connection: Connection,
    answers: usize,
}

impl Node {
    pub(crate) fn new(server: &Server, access: &Access) -> Result<Self, redis::RedisError> {
        let (host, port) = (server.host.clone(), server.port);
        let address = if access.tls {
            ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            }
        } else {
            ConnectionAddr::Tcp(host, port)
        };
        let mut settings = RedisConnectionInfo::default().set_skip_set_lib_name();
        if let Some(user) = &access.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &access.password {
            settings = settings.set_password(password.as_str());
        }
        let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
        let info = address.into_connection_info()?;
        let info = info.set_redis_settings(settings).set_tcp_settings(tcp);
        let client = match (&access.ca_certificates, access.tls) {
            (Some(certificates), true) => {
                let certificates = redis::TlsCertificates {
                    client_tls: None,
                    root_cert: Some(certificates.clone()),
                };
                Client::build_with_tls(info, certificates)?
            }
            _ => Client::open(info)?,
        };
        Ok(Self {
            client,
            state: Mutex::default(),
        })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects anew and has the server answer, for the error itself.
    pub(crate) fn try_connect(&self, within: Duration) -> Result<(), redis::RedisError> {
        let mut connection = self.client.get_connection_with_timeout(within)?;
        connection.set_read_timeout(Some(within))?;
        redis::cmd("PING").exec(&mut connection)?;
        self.state().idle.push(connection);
        Ok(())
    }

    fn connection(&self, deadline: Instant) -> Result<Connection, Failure> {
        {
            let mut state = self.state();
            if let Some(connection) = state.idle.pop() {
                return Ok(connection);
            }
            if state
                .resting_until
                .is_some_and(|until| Instant::now() < until)
            {
                let reason = "the store cannot be reached";
                return Err(Failure::Connection(RemoteError::Unavailable(reason)));
            }
        }
        let within = left_until(deadline)?;
        let connected = self.client.get_connection_with_timeout(within);
        connected.map_err(|error| {
            self.rest();
            of_connection(&error)
        })
    }

    /// Notes that a connection failed: those beside it most likely will, too. Where the server was too
    /// slow, it is left alone for a while; where it hung up, another connection may succeed at once.
    fn failed(&self, error: &redis::RedisError) -> Failure {
        self.state().idle.clear();
        if error.is_timeout() {
            self.rest();
        }
        of_connection(error)
    }

    /// Leaves the server alone for a while.
    fn rest(&self) {
        let mut state = self.state();
        let rest = FIRST_REST * 2_u32.saturating_pow(state.failures.min(8));
        state.failures += 1;
        state.resting_until = Some(Instant::now() + rest.min(LONGEST_REST));
    }

    /// Sends commands. Their answers are read by [`Exchange::answers`].
    pub(crate) fn send(
        &self,
        commands: &Commands,
        deadline: Instant,
    ) -> Result<Exchange<'_>, Failure> {
        let mut connection = self.connection(deadline)?;
        let within = left_until(deadline)?;
        let sent = connection
            .set_write_timeout(Some(within))
            .and_then(|()| connection.send_packed_command(&commands.bytes));
        match sent {
            Ok(()) => Ok(Exchange {
                node: self,
                connection,
                answers: commands.answers,
            }),
            Err(error) => Err(self.failed(&error)),
        }
    }
}

impl Exchange<'_> {
    /// Reads the answers, errors of the server among them.
    pub(crate) fn answers(mut self, deadline: Instant) -> Result<Vec<Value>, Failure> {
        let mut answers = Vec::with_capacity(self.answers);
        for _ in 0..self.answers {
            let within = left_until(deadline).inspect_err(|_| self.node.rest())?;
            let answer = self
                .connection
                .set_read_timeout(Some(within))
                .and_then(|()| self.connection.recv_response());
            match answer {
                Ok(answer) => answers.push(answer),
                Err(error) => return Err(self.node.failed(&error)),
            }
        }
        let mut state = self.node.state();
        state.failures = 0;
        state.resting_until = None;
        if state.idle.len() < IDLE {
            state.idle.push(self.connection);
        }
        Ok(answers)
    }
}

fn left_until(deadline: Instant) -> Result<Duration, Failure> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left < Duration::from_millis(1) {
        let reason = "the store did not answer in time";
        return Err(Failure::Connection(RemoteError::Unavailable(reason)));
    }
    Ok(left)
}
