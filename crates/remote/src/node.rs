//! Connections to one server.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use memfold_swap::RemoteError;
use redis::{Value, cmd};

use crate::{
    address::Server,
    answer::{AnswerReader, AnswerSize},
    deadline::left_until,
    failure::{ConnectionError, Failure, of_connection},
    names::Names,
    options::Access,
    stream::Stream,
};

/// The most idle connections kept to a server. More save connecting where many threads fault at once.
const IDLE: usize = 32;
/// How long a server that failed is left alone at first, and at most. Longer saves futile waits, and
/// finds later that it is back.
const FIRST_REST: Duration = Duration::from_millis(100);
const LONGEST_REST: Duration = Duration::from_secs(1);
/// How long answers are read beyond a deadline that has passed: one server that used all of the time must not cost
/// the answers of the others, which are there already. A call takes so much longer for each server.
const GRACE: Duration = Duration::from_millis(20);

#[derive(Default)]
struct State {
    idle: Vec<Connection>,
    /// Failures in a row.
    failures: u32,
    /// Set from a failure until the server answers again.
    resting_until: Option<Instant>,
    /// Why the last call failed, for those that are not made meanwhile.
    cause: Option<&'static str>,
    /// A call tries the server after its rest.
    is_probed: bool,
}

/// A server, and what is connected to it.
pub(crate) struct Node {
    server: Server,
    access: Arc<Access>,
    names: Arc<Names>,
    state: Mutex<State>,
}

/// Commands as they are sent, and the most that their answers may take.
#[derive(Default)]
pub(crate) struct Commands {
    bytes: Vec<u8>,
    answers: Vec<AnswerSize>,
}

impl Commands {
    /// Appends a command with one answer.
    pub(crate) fn push(&mut self, command: &redis::Cmd, answer: AnswerSize) {
        command.write_packed_command(&mut self.bytes);
        self.answers.push(answer);
    }

    /// The number of answers.
    pub(crate) fn answers(&self) -> usize {
        self.answers.len()
    }
}

/// A connection whose server knows the user.
struct Connection(AnswerReader<Stream>);

impl Connection {
    fn open(node: &Node, deadline: Instant) -> Result<Self, ConnectionError> {
        let Access {
            tls,
            user,
            password,
        } = &*node.access;
        let stream = Stream::connect(&node.server, &node.names, tls.as_ref(), deadline)?;
        let mut connection = Self(AnswerReader::new(stream));
        if let Some(password) = password {
            let mut auth = cmd("AUTH");
            user.iter().for_each(|user| {
                auth.arg(user);
            });
            auth.arg(password.as_str());
            match connection.ask(&auth, deadline)? {
                Value::Okay => {}
                Value::ServerError(error) => return Err(ConnectionError::of_auth(error)),
                _ => return Err(ConnectionError::Refused),
            }
        }
        Ok(connection)
    }

    fn send(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()> {
        let stream = self.0.stream();
        stream.set_deadline(deadline);
        stream.write_all(bytes)?;
        stream.flush()
    }

    fn ask(&mut self, command: &redis::Cmd, deadline: Instant) -> Result<Value, ConnectionError> {
        self.send(&command.get_packed_command(), deadline)?;
        Ok(self.0.read(AnswerSize::SHORT)?)
    }
}

/// The one call that tries a server after its rest, until it is dropped.
struct Probe<'a>(&'a Node);

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        self.0.state().is_probed = false;
    }
}

/// Commands that were sent, until their answers are read. If it is dropped before, the connection is
/// closed: an answer that comes late is never taken for another's.
pub(crate) struct Exchange<'a> {
    node: &'a Node,
    connection: Connection,
    answers: Vec<AnswerSize>,
    _probe: Option<Probe<'a>>,
}

impl Node {
    pub(crate) fn new(server: &Server, access: &Arc<Access>) -> Self {
        Self {
            server: server.clone(),
            access: Arc::clone(access),
            names: Arc::default(),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects anew and has the server answer, for the error itself.
    pub(crate) fn try_connect(&self, within: Duration) -> Result<(), ConnectionError> {
        let deadline = Instant::now() + within;
        let mut connection = Connection::open(self, deadline)?;
        if let Value::ServerError(error) = connection.ask(&cmd("PING"), deadline)? {
            return Err(ConnectionError::Server(error));
        }
        self.state().idle.push(connection);
        Ok(())
    }

    /// A connection. After a rest one call alone gets one, until it is over: a server that still does not answer holds
    /// up no other.
    fn connection(&self, deadline: Instant) -> Result<(Connection, Option<Probe<'_>>), Failure> {
        let probe = {
            let mut state = self.state();
            while let Some(mut connection) = state.idle.pop() {
                if connection.0.stream().is_open() {
                    return Ok((connection, None));
                }
            }
            let rests = |until| state.is_probed || Instant::now() < until;
            if state.resting_until.is_some_and(rests) {
                let reason = state.cause.unwrap_or("the store cannot be reached");
                return Err(Failure::Connection(RemoteError::Unavailable(reason)));
            }
            state.is_probed = state.resting_until.is_some();
            state.is_probed.then(|| Probe(self))
        };
        // Where nothing is left of a call's time, the server is not to blame.
        left_until(deadline).map_err(|error| of_connection(&error.into()))?;
        match Connection::open(self, deadline) {
            Ok(connection) => Ok((connection, probe)),
            Err(error) => {
                let failure = of_connection(&error);
                self.rest(&failure);
                Err(failure)
            }
        }
    }

    /// Notes that a connection failed: those beside it most likely will, too. Where the server was too
    /// slow, it is left alone for a while; where it hung up, another connection may succeed at once.
    fn failed(&self, error: &ConnectionError) -> Failure {
        self.state().idle.clear();
        let failure = of_connection(error);
        if !error.is_hung_up() {
            self.rest(&failure);
        }
        failure
    }

    /// Leaves the server alone for a while, after a failure.
    fn rest(&self, failure: &Failure) {
        let mut state = self.state();
        if let Failure::Connection(RemoteError::Unavailable(cause)) = failure {
            state.cause = Some(cause);
        }
        let rest = FIRST_REST * 2_u32.saturating_pow(state.failures.min(8));
        state.failures = state.failures.saturating_add(1);
        state.resting_until = Some(Instant::now() + rest.min(LONGEST_REST));
    }

    /// Sends commands. Their answers are read by [`Exchange::answers`].
    pub(crate) fn send(
        &self,
        commands: &Commands,
        deadline: Instant,
    ) -> Result<Exchange<'_>, Failure> {
        let (mut connection, probe) = self.connection(deadline)?;
        match connection.send(&commands.bytes, deadline) {
            Ok(()) => Ok(Exchange {
                node: self,
                connection,
                answers: commands.answers.clone(),
                _probe: probe,
            }),
            Err(error) => Err(self.failed(&error.into())),
        }
    }
}

impl Exchange<'_> {
    /// Reads the answers, errors of the server among them.
    pub(crate) fn answers(mut self, deadline: Instant) -> Result<Vec<Value>, Failure> {
        let deadline = deadline.max(Instant::now() + GRACE);
        self.connection.0.stream().set_deadline(deadline);
        let mut answers = Vec::with_capacity(self.answers.len());
        for size in &self.answers {
            match self.connection.0.read(*size) {
                Ok(answer) => answers.push(answer),
                Err(error) => return Err(self.node.failed(&error.into())),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use std::{
        io::Read,
        net::{TcpListener, TcpStream},
        sync::Barrier,
        thread::{scope, sleep},
    };

    fn ping(node: &Node, within: Duration) -> Result<Vec<Value>, Failure> {
        let deadline = Instant::now() + within;
        let mut commands = Commands::default();
        commands.push(&cmd("PING"), AnswerSize::SHORT);
        node.send(&commands, deadline)?.answers(deadline)
    }

    /// Connections made since the last call.
    fn accepted(listener: &TcpListener) -> Vec<TcpStream> {
        listener.set_nonblocking(true).expect("a socket");
        listener.incoming().map_while(Result::ok).collect()
    }

    #[test]
    fn one_call_tries_a_server_after_its_rest() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let address = format!("valkey://127.0.0.1:{port}").parse();
        let options = Options::new(address.expect("an address"));
        let access = Access::of(&options).expect("no certificates");
        let node = Node::new(&options.address.servers[0], &Arc::new(access));
        assert!(ping(&node, Duration::from_millis(200)).is_err());
        assert_eq!(accepted(&listener).len(), 1);

        // The server accepts connections, and does not answer.
        sleep(FIRST_REST);
        let barrier = Barrier::new(2);
        scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    barrier.wait();
                    assert!(ping(&node, Duration::from_secs(1)).is_err());
                });
            }
        });
        assert_eq!(accepted(&listener).len(), 1);

        // One that answers is used by all.
        sleep(2 * FIRST_REST);
        scope(|scope| {
            scope.spawn(|| {
                listener.set_nonblocking(false).expect("a socket");
                for _ in 0..2 {
                    let (mut stream, _) = listener.accept().expect("a connection");
                    let command = cmd("PING").get_packed_command();
                    stream
                        .read_exact(&mut vec![0; command.len()])
                        .expect("PING");
                    stream.write_all(b"+PONG\r\n").expect("an answer");
                }
            });
            ping(&node, Duration::from_secs(10)).expect("an answer");
            node.state().idle.clear();
            ping(&node, Duration::from_secs(10)).expect("an answer");
        });
    }
}
