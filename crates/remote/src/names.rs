//! Looking up the addresses of a server's name: the resolver knows no deadline, so a thread asks it.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{address::Server, deadline::left_until, threads::spawn};

struct State {
    /// Whether a thread asks. It is not waited for longer than a deadline, and there is never a second one.
    is_asking: bool,
    /// Answers so far.
    answers: u64,
    /// The last one.
    found: Result<Vec<SocketAddr>, String>,
}

/// The addresses of one server. They are asked for anew each time: a server that restarts may have another.
#[derive(Default)]
pub(crate) struct Names {
    state: Mutex<State>,
    answered: Condvar,
}

impl Default for State {
    fn default() -> Self {
        Self {
            is_asking: false,
            answers: 0,
            found: Ok(Vec::new()),
        }
    }
}

impl Names {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The addresses of a server; at least one.
    pub(crate) fn look_up(
        self: &Arc<Self>,
        server: &Server,
        deadline: Instant,
    ) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = server.host.parse::<IpAddr>() {
            return Ok(vec![SocketAddr::new(address, server.port)]);
        }
        let mut state = self.state();
        if !state.is_asking {
            let (names, server) = (Arc::clone(self), server.clone());
            spawn("remote-names", move || names.ask(&server))?;
            state.is_asking = true;
        }
        let before = state.answers;
        let left = left_until(deadline)?;
        let waited = self
            .answered
            .wait_timeout_while(state, left, |state| state.answers == before);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.answers == before {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match &state.found {
            Ok(found) if found.is_empty() => Err(io::Error::other("its name has no address")),
            Ok(found) => Ok(found.clone()),
            Err(error) => Err(io::Error::other(error.clone())),
        }
    }

    fn ask(&self, server: &Server) {
        let found = (server.host.as_str(), server.port).to_socket_addrs();
        let mut state = self.state();
        state.is_asking = false;
        state.answers += 1;
        state.found = found
            .map(Iterator::collect)
            .map_err(|error| error.to_string());
        drop(state);
        self.answered.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn look_up(names: &Arc<Names>, host: &str, within: Duration) -> io::Result<Vec<SocketAddr>> {
        let server = Server {
            host: host.to_owned(),
            port: 7,
        };
        names.look_up(&server, Instant::now() + within)
    }

    #[test]
    fn names_and_addresses_are_found() {
        let names = Arc::default();
        let long = Duration::from_secs(60);
        let found = look_up(&names, "::1", long).unwrap();
        assert_eq!(found, ["[::1]:7".parse::<SocketAddr>().unwrap()]);
        let found = look_up(&names, "localhost", long).unwrap();
        assert!(
            found
                .iter()
                .all(|one| one.ip().is_loopback() && one.port() == 7)
        );
        assert!(look_up(&names, "a..b", long).is_err());
    }

    #[test]
    fn a_resolver_that_does_not_answer_is_not_waited_for() {
        let names = Arc::new(Names::default());
        // As if a thread asked already.
        names.state().is_asking = true;
        let error = look_up(&names, "localhost", Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
