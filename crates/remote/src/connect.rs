//! The first connection: what is wrong with a store is found before a program depends on it.

use std::time::{Duration, Instant};

use memfold_swap::{Batch, BatchId, Place, RemoteBackend, RemoteError, Removal};
use redis::{Value, cmd};

use crate::{
    address::{Server, StoreAddress},
    answer::AnswerSize,
    node::Commands,
    open_error::OpenError,
    options::Options,
    store::Store,
    topology::Topology,
};

/// How long a server may take to be connected to.
const CONNECT: Duration = Duration::from_secs(5);
/// How long all primaries may take to say how they are set up.
const CHECK: Duration = Duration::from_secs(30);

impl Store {
    /// Connects, and tries all that is needed.
    pub(crate) fn check(&self, options: &Options) -> Result<(), OpenError> {
        let address = &options.address;
        self.reach(address)?;
        let topology = self.topology().map_err(|error| OpenError::Unusable {
            address: address.clone(),
            reason: format!("{error}, or none is a primary"),
        })?;
        let until = Instant::now() + CHECK;
        for server in &topology.primaries {
            self.check_primary(server, options, until)?;
        }
        self.check_others(address, &topology, until)?;
        self.try_page(address)
    }

    /// Refuses an address of several primaries that are no cluster: where the first does not answer for a moment, pages would
    /// be looked for on another one, and be taken for lost. One that is known by two names is one.
    fn check_others(
        &self,
        address: &StoreAddress,
        topology: &Topology,
        until: Instant,
    ) -> Result<(), OpenError> {
        let Some(first) = topology.alone() else {
            return Ok(());
        };
        for other in address.servers.iter().filter(|server| *server != first) {
            let deadline = until.min(Instant::now() + CONNECT);
            let found = self.ask(other, deadline);
            let is_primary = found.is_some_and(|found| found.alone() == Some(other));
            if !is_primary {
                continue;
            }
            let numbers = [first, other].map(|server| self.replication_id(server, until));
            if numbers[0].is_none() || numbers[0] != numbers[1] {
                return Err(OpenError::NoCluster {
                    address: address.clone(),
                    first: first.to_string(),
                    other: other.to_string(),
                });
            }
        }
        Ok(())
    }

    /// The number of what a server replicates, which no other primary has.
    fn replication_id(&self, server: &Server, until: Instant) -> Option<String> {
        let node = self.node(server);
        let mut commands = Commands::default();
        commands.push(cmd("INFO").arg("replication"), AnswerSize::TEXT);
        let deadline = until.min(Instant::now() + CONNECT);
        let exchange = node.send(&commands, deadline).ok()?;
        let answers = exchange.answers(deadline).ok()?;
        match answers.first()? {
            Value::BulkString(bytes) => {
                let text = String::from_utf8_lossy(bytes);
                field(&text, "master_replid").map(str::to_owned)
            }
            _ => None,
        }
    }

    /// Connects to any of the given servers.
    fn reach(&self, address: &StoreAddress) -> Result<(), OpenError> {
        let mut last = OpenError::Unreachable {
            address: address.clone(),
            reason: "no server was given".to_owned(),
        };
        for server in &address.servers {
            let Err(error) = self.node(server).try_connect(CONNECT) else {
                return Ok(());
            };
            let is_refused = crate::failure::of_connection(&error).error() == RemoteError::Refused;
            last = if is_refused {
                OpenError::Refused {
                    address: address.clone(),
                }
            } else {
                OpenError::Unreachable {
                    address: address.clone(),
                    reason: format!("{server}: {error}"),
                }
            };
        }
        Err(last)
    }

    /// Warns of a primary that may throw pages away, and refuses one with too few replicas.
    fn check_primary(
        &self,
        server: &Server,
        options: &Options,
        until: Instant,
    ) -> Result<(), OpenError> {
        let unusable = |reason: String| OpenError::Unusable {
            address: options.address.clone(),
            reason: format!("{server}: {reason}"),
        };
        let node = self.node(server);
        let mut commands = Commands::default();
        commands.push(cmd("INFO").arg("memory"), AnswerSize::TEXT);
        commands.push(cmd("INFO").arg("replication"), AnswerSize::TEXT);
        let deadline = until.min(Instant::now() + CONNECT);
        let answers = node
            .send(&commands, deadline)
            .and_then(|exchange| exchange.answers(deadline))
            .map_err(|failure| unusable(failure.error().to_string()))?;
        let text = |value: &Value| match value {
            Value::BulkString(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            _ => String::new(),
        };
        if matches!(answers[0], Value::ServerError(_)) {
            return Err(crate::failure::of_value(&answers[0]).map_or_else(
                || unusable("it does not answer INFO".to_owned()),
                |failure| match failure.error() {
                    RemoteError::Refused => OpenError::Refused {
                        address: options.address.clone(),
                    },
                    error => unusable(error.to_string()),
                },
            ));
        }
        let (memory, replication) = (text(&answers[0]), text(&answers[1]));
        let policy = field(&memory, "maxmemory_policy").unwrap_or("noeviction");
        if field(&memory, "maxmemory") != Some("0") && policy != "noeviction" {
            log::warn!(
                "the store's server {server} evicts keys when it is full ({policy}): a program whose \
                 pages it evicts is killed; set maxmemory-policy noeviction"
            );
        }
        let found = field(&replication, "connected_slaves").and_then(|text| text.parse().ok());
        let found: u32 = found.unwrap_or(0);
        if found < options.replicas {
            return Err(OpenError::TooFewReplicas {
                server: server.to_string(),
                found,
                wanted: options.replicas,
            });
        }
        Ok(())
    }

    /// Writes, reads, renews and removes a page.
    fn try_page(&self, address: &StoreAddress) -> Result<(), OpenError> {
        // Far from the numbers that a run reaches first; removed before the tier exists.
        let id = BatchId::from_raw((1 << 38) - 1);
        let whole = Removal {
            batch: id,
            pages: None,
        };
        self.try_batch(whole).map_err(|reason| {
            // The page may have arrived, whatever failed. If this fails, too, it expires.
            self.remove(&[whole]);
            OpenError::Unusable {
                address: address.clone(),
                reason,
            }
        })
    }

    /// The same with the batch that is then removed. `Err` with what fails, and why.
    fn try_batch(&self, whole: Removal) -> Result<(), String> {
        let id = whole.batch;
        let record = self.key(id).into_bytes();
        let step = |doing: &str, outcome: Result<bool, RemoteError>| match outcome {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!("{doing} a first page had no effect")),
            Err(error) => Err(format!("{doing} a first page failed: {error}")),
        };
        let batch = Batch {
            id,
            records: vec![record.clone()],
        };
        let one = |outcomes: Vec<Result<bool, RemoteError>>| {
            let none = Err(RemoteError::Unavailable("no outcome"));
            outcomes.into_iter().next().unwrap_or(none)
        };
        let put = self.put(&[batch]).into_iter().map(|one| one.map(|()| true));
        step("writing", one(put.collect()))?;
        let got = self
            .get(&[Place {
                batch: id,
                index: 0,
            }])
            .into_iter();
        let got = got.map(|one| one.map(|found| found.as_ref() == Some(&record)));
        step("reading", one(got.collect()))?;
        step("renewing", one(self.renew(&[id])))?;
        let page = Removal {
            pages: Some(1),
            ..whole
        };
        for removal in [page, whole] {
            let removed = self.remove(&[removal]).into_iter();
            step(
                "removing",
                one(removed.map(|one| one.map(|()| true)).collect()),
            )?;
        }
        Ok(())
    }
}

/// The value of a field of INFO's answer.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let value = |line: &'a str| line.strip_prefix(name)?.strip_prefix(':');
    text.lines().find_map(value).map(str::trim_end)
}

#[cfg(test)]
mod tests {
    use super::field;

    #[test]
    fn fields_of_info_are_found() {
        let text = "# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n";
        assert_eq!(field(text, "maxmemory"), Some("0"));
        assert_eq!(field(text, "maxmemory_policy"), Some("noeviction"));
        assert_eq!(field(text, "memory"), None);
    }
}
