//! The backend: which command goes to which server, and what the answers mean.
//!
//! A batch is a hash: its key is `memfold:RUN:BATCH`, its fields are the pages' indices. So the pages of
//! a batch share a round trip, a hash slot and a time to live, each can be removed alone, and the key
//! is gone with its last page.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use memfold_swap::{Batch, BatchId, Place, RemoteBackend, RemoteError, RemoteTier, Removal};
use redis::{Cmd, Value, cmd};
use rustix::time::{ClockId, clock_gettime};

use crate::{
    address::Server,
    answer::AnswerSize,
    failure::{Failure, asks, of_value},
    node::{Commands, Exchange, Node},
    open_error::OpenError,
    options::{Access, Options},
    topology::{Topology, redirection, slot_of},
};

/// The longest that one call waits for the store. Longer bears a slower store, and keeps a page that
/// is on its way out for longer.
const CALL: Duration = Duration::from_secs(2);
/// The least time between two looks at which server has which slots. Longer spares the servers, and
/// follows a failover later.
const LOOK: Duration = Duration::from_millis(100);
/// The least time that each server has for being connected and sent to, while there is as much of the call left.
/// Longer bears slower networks, and fewer servers that do not answer beside those that do.
const LEAST_SHARE: Duration = Duration::from_millis(200);
/// The most servers whose connections are kept; a store names new ones in its answers.
const MOST_SERVERS: usize = 1024;
/// The part of a call for which replicas are waited for.
const REPLICAS_WITHIN: Duration = Duration::from_millis(1500);

/// A store, for one run.
pub(crate) struct Store {
    access: Arc<Access>,
    seeds: Vec<Server>,
    run: String,
    replicas: u32,
    time_to_live: Duration,
    started: Instant,
    topology: RwLock<Option<Arc<Topology>>>,
    nodes: Mutex<HashMap<Server, Arc<Node>>>,
    /// When the topology was last looked at; locked while it is.
    looked: Mutex<Option<Instant>>,
}

/// What is sent to one server: commands, and which parts of the call they answer.
#[derive(Default)]
pub(crate) struct Part {
    commands: Commands,
    /// Index of a part of the call, and the number of its answers, in order.
    pub(crate) of: Vec<(usize, usize)>,
}

/// A part of a call: what concerns one key.
struct Request {
    key: String,
    commands: Vec<Cmd>,
    /// The most that each answer may take.
    answer: AnswerSize,
}

impl Request {
    /// Commands with short answers.
    fn new(key: String, commands: Vec<Cmd>) -> Self {
        Self {
            key,
            commands,
            answer: AnswerSize::SHORT,
        }
    }

    fn push_to(&self, commands: &mut Commands) {
        for command in &self.commands {
            commands.push(command, self.answer);
        }
    }
}

/// The time until which the first of so many servers may be connected and sent to, so that one that does not answer
/// leaves time for the others.
fn share(deadline: Instant, servers: usize) -> Instant {
    let now = Instant::now();
    let left = deadline.saturating_duration_since(now);
    let share = left / u32::try_from(servers.max(1)).unwrap_or(u32::MAX);
    now + share.max(LEAST_SHARE).min(left)
}

impl Store {
    pub(crate) fn new(options: &Options, run: String) -> Result<Self, OpenError> {
        let access = Access::of(options).map_err(|reason| OpenError::Authorities {
            address: options.address.clone(),
            reason,
        })?;
        Ok(Self {
            access: Arc::new(access),
            seeds: options.address.servers.clone(),
            run,
            replicas: options.replicas,
            time_to_live: options.time_to_live,
            started: Instant::now(),
            topology: RwLock::default(),
            nodes: Mutex::default(),
            looked: Mutex::default(),
        })
    }

    fn nodes(&self) -> MutexGuard<'_, HashMap<Server, Arc<Node>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connections to a server.
    pub(crate) fn node(&self, server: &Server) -> Arc<Node> {
        let mut nodes = self.nodes();
        if let Some(node) = nodes.get(server) {
            return Arc::clone(node);
        }
        if nodes.len() >= MOST_SERVERS {
            nodes.retain(|server, _| self.seeds.contains(server));
        }
        let node = Arc::new(Node::new(server, &self.access));
        nodes.insert(server.clone(), Arc::clone(&node));
        node
    }

    fn known_topology(&self) -> Option<Arc<Topology>> {
        let topology = self.topology.read().unwrap_or_else(PoisonError::into_inner);
        topology.clone()
    }

    /// Where each hash slot is. Looks anew if that is not known.
    pub(crate) fn topology(&self) -> Result<Arc<Topology>, RemoteError> {
        if let Some(topology) = self.known_topology() {
            return Ok(topology);
        }
        self.look();
        self.known_topology()
            .ok_or(RemoteError::Unavailable("no server of the store answers"))
    }

    /// Looks which server has which slots, unless that was just done or another thread does.
    ///
    /// A primary that is cut off from the others, and not from here, answers as before, and knows nothing
    /// of its successor. So a server that has lost the majority is believed only if it knows of a later
    /// election than this does, and none that knows of fewer. (A cluster that is set up anew meanwhile is
    /// not found: the pages are gone with the old one.)
    fn look(&self) {
        let Ok(mut looked) = self.looked.try_lock() else {
            return;
        };
        if looked.is_some_and(|at| at.elapsed() < LOOK) {
            return;
        }
        let mut servers = self.seeds.clone();
        if let Some(topology) = self.known_topology() {
            // What is known most likely knows more than what was given at the start.
            servers.splice(0..0, topology.primaries.iter().cloned());
        }
        servers.extend(self.nodes().keys().cloned());
        let known = self.known_topology();
        let mut asked = Vec::new();
        let mut found: Option<Topology> = None;
        let deadline = Instant::now() + CALL;
        let count = servers.len();
        for (index, server) in servers.into_iter().enumerate() {
            if Instant::now() >= deadline {
                break;
            }
            if asked.contains(&server) {
                continue;
            }
            let share = share(deadline, count - index).min(Instant::now() + CALL / 4);
            if let Some(topology) = self.ask(&server, share)
                && topology.replaces(found.as_ref().or(known.as_deref()))
            {
                let is_whole = topology.is_whole;
                found = Some(topology);
                if is_whole {
                    break;
                }
            }
            asked.push(server);
        }
        if let Some(topology) = found {
            // What has left is not connected to any more.
            let primaries: HashSet<_> = topology.primaries.iter().collect();
            self.nodes()
                .retain(|server, _| self.seeds.contains(server) || primaries.contains(server));
            let mut place = self
                .topology
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            *place = Some(Arc::new(topology));
        }
        *looked = Some(Instant::now());
    }

    /// What a server says of its cluster, or of itself, if it is a primary.
    pub(crate) fn ask(&self, server: &Server, deadline: Instant) -> Option<Topology> {
        let node = self.node(server);
        let mut commands = Commands::default();
        commands.push(cmd("CLUSTER").arg("SLOTS"), AnswerSize::SLOTS);
        commands.push(&cmd("ROLE"), AnswerSize::TEXT);
        commands.push(cmd("CLUSTER").arg("INFO"), AnswerSize::TEXT);
        let answers = node
            .send(&commands, deadline)
            .ok()?
            .answers(deadline)
            .ok()?;
        let [slots, role, info] = &answers[..] else {
            return None;
        };
        if let Some(topology) = Topology::of_slots(slots, server) {
            return Some(topology.with_state(info));
        }
        let Value::Array(role) = role else {
            return None;
        };
        let is_alone = matches!(slots, Value::ServerError(_));
        let is_primary = matches!(role.first(), Some(Value::BulkString(name)) if name == b"master");
        (is_alone && is_primary).then(|| Topology::single(server.clone()))
    }

    /// The key of a batch.
    pub(crate) fn key(&self, batch: BatchId) -> String {
        format!("memfold:{}:{:x}", self.run, batch.into_raw())
    }

    fn milliseconds_to_live(&self) -> u64 {
        self.time_to_live.as_millis() as u64
    }

    /// Sends the commands of each part of a call to the server of its key, all servers at once, and
    /// returns the answers of each part. With `replicas`, they have acknowledged all of it.
    fn call(&self, parts: Vec<Request>, replicas: u32) -> Vec<Result<Vec<Value>, Failure>> {
        let count = parts.len();
        let topology = match self.topology() {
            Ok(topology) => topology,
            Err(error) => return vec![Err(Failure::Connection(error)); count],
        };
        let no_server = Failure::Connection(RemoteError::Unavailable("no server has the slot"));
        let mut outcomes = vec![Err(no_server); count];
        let mut by_server: BTreeMap<&Server, Part> = BTreeMap::new();
        for (index, request) in parts.iter().enumerate() {
            if let Some(server) = topology.primary(slot_of(&request.key)) {
                let part = by_server.entry(server).or_default();
                request.push_to(&mut part.commands);
                part.of.push((index, request.commands.len()));
            }
        }
        let deadline = Instant::now() + CALL;
        if replicas > 0 {
            let within = REPLICAS_WITHIN.as_millis() as u64;
            for part in by_server.values_mut() {
                let wait = cmd("WAIT").arg(replicas).arg(within).to_owned();
                part.commands.push(&wait, AnswerSize::SHORT);
            }
        }
        let nodes: Vec<_> = by_server.keys().map(|server| self.node(server)).collect();
        let sent: Vec<Result<Exchange<'_>, Failure>> = nodes
            .iter()
            .zip(by_server.values())
            .enumerate()
            .map(|(index, (node, part))| {
                node.send(&part.commands, share(deadline, nodes.len() - index))
            })
            .collect();
        let mut redirected = Vec::new();
        for (exchange, (server, part)) in sent.into_iter().zip(&by_server) {
            let answers = exchange.and_then(|exchange| exchange.answers(deadline));
            // Keys of a slot that is on its way to another server may be there.
            if let (Ok(answers), true) = (&answers, part.of.len() == part.commands.answers()) {
                let elsewhere =
                    part.of.iter().zip(answers).filter_map(|(one, answer)| {
                        Some((one.0, redirection(asks(answer)?, server)?))
                    });
                redirected.extend(elsewhere);
            }
            spread(answers, part, replicas, &mut outcomes);
        }
        for (index, server) in redirected {
            outcomes[index] = self.ask_for(&parts[index], &server, deadline);
        }
        let is_stale = |outcome: &Result<Vec<Value>, Failure>| match outcome {
            Ok(_) => false,
            Err(Failure::Connection(_)) => true,
            Err(Failure::Answer { moved, .. }) => *moved,
        };
        if outcomes.iter().any(is_stale) {
            self.look();
        }
        outcomes
    }
}

impl Store {
    /// Sends the one command of a part to a server that a redirection named.
    fn ask_for(
        &self,
        request: &Request,
        server: &Server,
        deadline: Instant,
    ) -> Result<Vec<Value>, Failure> {
        let node = self.node(server);
        let mut commands = Commands::default();
        commands.push(&cmd("ASKING"), AnswerSize::SHORT);
        request.push_to(&mut commands);
        let mut answers = node.send(&commands, deadline)?.answers(deadline)?;
        // An error of `ASKING` comes first: that of the command only follows from it.
        if let Some(failure) = answers.iter().find_map(of_value) {
            return Err(failure);
        }
        answers.remove(0);
        Ok(answers)
    }
}

/// Gives each part of a call its answers, or the first error among them.
pub(crate) fn spread(
    answers: Result<Vec<Value>, Failure>,
    part: &Part,
    replicas: u32,
    outcomes: &mut [Result<Vec<Value>, Failure>],
) {
    let mut answers = match answers {
        Ok(answers) => answers.into_iter(),
        Err(failure) => {
            for (index, _) in &part.of {
                outcomes[*index] = Err(failure);
            }
            return;
        }
    };
    for (index, count) in &part.of {
        let own: Vec<_> = answers.by_ref().take(*count).collect();
        outcomes[*index] = match own.iter().find_map(of_value) {
            Some(failure) => Err(failure),
            None => Ok(own),
        };
    }
    let acknowledged = match answers.next() {
        Some(Value::Int(count)) => count >= i64::from(replicas),
        _ => false,
    };
    if replicas > 0 && !acknowledged {
        let error = RemoteError::TooFewReplicas;
        for (index, _) in &part.of {
            if outcomes[*index].is_ok() {
                outcomes[*index] = Err(Failure::Answer {
                    error,
                    moved: false,
                });
            }
        }
    }
}

const UNEXPECTED: RemoteError = RemoteError::Unavailable("the server's answer is not understood");

/// Whether the answers to a batch say that as many records were added, with a time to live.
pub(crate) fn was_stored(
    outcome: Result<Vec<Value>, Failure>,
    records: usize,
) -> Result<(), RemoteError> {
    let answers = outcome.map_err(Failure::error)?;
    let added = Value::Int(records as i64);
    match answers.last() {
        Some(Value::Array(done)) if done[..] == [added, Value::Int(1)] => Ok(()),
        _ => Err(UNEXPECTED),
    }
}

/// The records that the last answer has, as many as were asked for.
pub(crate) fn records(
    outcome: Result<Vec<Value>, Failure>,
    wanted: usize,
) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
    let record = |value| match value {
        Value::BulkString(record) => Ok(Some(record)),
        Value::Nil => Ok(None),
        _ => Err(UNEXPECTED),
    };
    match outcome.map(|mut answers| answers.pop()) {
        Ok(Some(Value::Array(records))) if records.len() == wanted => {
            records.into_iter().map(record).collect()
        }
        Ok(_) => vec![Err(UNEXPECTED); wanted],
        Err(failure) => vec![Err(failure.error()); wanted],
    }
}

/// Whether the server still had what was to be renewed.
pub(crate) fn was_renewed(outcome: Result<Vec<Value>, Failure>) -> Result<bool, RemoteError> {
    match outcome.map_err(Failure::error)?.first() {
        Some(Value::Int(count)) => Ok(*count == 1),
        _ => Err(UNEXPECTED),
    }
}

impl RemoteBackend for Store {
    fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>> {
        // In one transaction: no key is ever without a time to live.
        let commands = |batch: &Batch| {
            let key = self.key(batch.id);
            let mut set = cmd("HSET");
            set.arg(&key);
            for (index, record) in batch.records.iter().enumerate() {
                set.arg(index).arg(&record[..]);
            }
            let mut expire = cmd("PEXPIRE");
            expire.arg(&key).arg(self.milliseconds_to_live());
            Request::new(key, vec![cmd("MULTI"), set, expire, cmd("EXEC")])
        };
        let outcomes = self.call(batches.iter().map(commands).collect(), self.replicas);
        let stored = |(batch, outcome): (&Batch, _)| was_stored(outcome, batch.records.len());
        batches.iter().zip(outcomes).map(stored).collect()
    }

    fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
        let mut by_batch: BTreeMap<BatchId, Vec<usize>> = BTreeMap::new();
        for (index, place) in places.iter().enumerate() {
            by_batch.entry(place.batch).or_default().push(index);
        }
        let commands = |(batch, indices): (&BatchId, &Vec<usize>)| {
            let key = self.key(*batch);
            let mut get = cmd("HMGET");
            get.arg(&key);
            for index in indices {
                get.arg(places[*index].index);
            }
            Request {
                answer: AnswerSize::strings(indices.len(), RemoteTier::LONGEST_RECORD),
                ..Request::new(key, vec![get])
            }
        };
        let outcomes = self.call(by_batch.iter().map(commands).collect(), 0);
        let mut got = vec![Err(UNEXPECTED); places.len()];
        for (indices, outcome) in by_batch.values().zip(outcomes) {
            for (index, record) in indices.iter().zip(records(outcome, indices.len())) {
                got[*index] = record;
            }
        }
        got
    }

    fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>> {
        let commands = |removal: &Removal| {
            let key = self.key(removal.batch);
            let command = match removal.pages {
                None => cmd("UNLINK").arg(&key).to_owned(),
                Some(pages) => {
                    let mut remove = cmd("HDEL");
                    remove.arg(&key);
                    for index in (0..u64::BITS).filter(|index| pages >> index & 1 == 1) {
                        remove.arg(index);
                    }
                    remove
                }
            };
            Request::new(key, vec![command])
        };
        // A replica that takes over without having heard of it would keep them.
        let outcomes = self.call(removals.iter().map(commands).collect(), self.replicas);
        let removed = |outcome: Result<_, Failure>| outcome.map(drop).map_err(Failure::error);
        outcomes.into_iter().map(removed).collect()
    }

    fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>> {
        let commands = |batch: &BatchId| {
            let key = self.key(*batch);
            let mut expire = cmd("PEXPIRE");
            expire.arg(&key).arg(self.milliseconds_to_live());
            Request::new(key, vec![expire])
        };
        let outcomes = self.call(batches.iter().map(commands).collect(), 0);
        outcomes.into_iter().map(was_renewed).collect()
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn time_of_store(&self) -> Duration {
        let time = clock_gettime(ClockId::Boottime);
        // The kernel gives neither below 0 here.
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    fn sleep(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}
