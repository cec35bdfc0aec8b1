//! Which server holds which hash slots.

use std::collections::HashMap;

use redis::Value;

use crate::address::{Server, is_host};

/// Hash slots of a cluster.
const SLOTS: u16 = 16_384;
/// The most primaries of a cluster, which its specification gives. Each is connected to.
const MOST_PRIMARIES: usize = 1000;

/// The hash slot of a key without braces.
pub(crate) fn slot_of(key: &str) -> u16 {
    crc16::State::<crc16::XMODEM>::calculate(key.as_bytes()) % SLOTS
}

/// The servers of a store, and ranges of hash slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topology {
    /// Each once.
    pub(crate) primaries: Vec<Server>,
    /// First and last slot, and the index of the primary; in order.
    ranges: Vec<(u16, u16, usize)>,
    /// Whether the server that says so reaches most of its cluster.
    pub(crate) is_whole: bool,
    /// The latest election that it knows of.
    epoch: u64,
    is_cluster: bool,
}

impl Topology {
    /// A store of one server.
    pub(crate) fn single(server: Server) -> Self {
        Self {
            primaries: vec![server],
            ranges: vec![(0, SLOTS - 1, 0)],
            is_whole: true,
            epoch: 0,
            is_cluster: false,
        }
    }

    /// The server, where it is one without a cluster.
    pub(crate) fn alone(&self) -> Option<&Server> {
        self.primaries.first().filter(|_| !self.is_cluster)
    }

    /// The primary that has a slot; `None` if none has.
    pub(crate) fn primary(&self, slot: u16) -> Option<&Server> {
        let at = self.ranges.partition_point(|range| range.1 < slot);
        let (first, _, primary) = self.ranges.get(at)?;
        (*first <= slot).then(|| &self.primaries[*primary])
    }

    /// The meaning of the answer to `CLUSTER SLOTS` of the server `asked`; `None` if it has none.
    pub(crate) fn of_slots(answer: &Value, asked: &Server) -> Option<Self> {
        let Value::Array(entries) = answer else {
            return None;
        };
        if entries.len() > usize::from(SLOTS) {
            return None;
        }
        let mut indices = HashMap::new();
        let mut found = Self {
            primaries: Vec::new(),
            ranges: Vec::new(),
            is_whole: true,
            epoch: 0,
            is_cluster: true,
        };
        for entry in entries {
            let Value::Array(fields) = entry else {
                return None;
            };
            let [first, last, primary, ..] = &fields[..] else {
                return None;
            };
            let (first, last) = (slot_number(first)?, slot_number(last)?);
            let server = server_of(primary, asked)?;
            let next = found.primaries.len();
            let index = *indices.entry(server.clone()).or_insert(next);
            if index == next {
                found.primaries.push(server);
            }
            if found.primaries.len() > MOST_PRIMARIES {
                return None;
            }
            found.ranges.push((first, last, index));
        }
        found.ranges.sort_unstable();
        let overlaps = |pair: &[(u16, u16, usize)]| pair[1].0 <= pair[0].1;
        let is_wrong = found.ranges.iter().any(|range| range.0 > range.1)
            || found.ranges.windows(2).any(overlaps);
        (!is_wrong && !found.ranges.is_empty()).then_some(found)
    }
}

impl Topology {
    /// The same with what the server's `CLUSTER INFO` says. Where it may not be asked for that, it is
    /// believed.
    pub(crate) fn with_state(mut self, info: &Value) -> Self {
        let text = match info {
            Value::BulkString(bytes) => String::from_utf8_lossy(bytes),
            Value::SimpleString(text) => text.into(),
            _ => return self,
        };
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.map(str::trim)
        };
        self.is_whole = field("cluster_state:") != Some("fail");
        let epoch = field("cluster_current_epoch:").and_then(|epoch| epoch.parse().ok());
        self.epoch = epoch.unwrap_or(0);
        self
    }

    /// Whether this is newer than what is known.
    pub(crate) fn replaces(&self, known: Option<&Self>) -> bool {
        known.is_none_or(|known| {
            self.epoch > known.epoch || self.is_whole && self.epoch == known.epoch
        })
    }
}

/// The server that an `ASK` redirection names: `SLOT HOST:PORT`. Without a host, it is the one that was
/// asked.
pub(crate) fn redirection(detail: &str, asked: &Server) -> Option<Server> {
    let (_, address) = detail.split_once(' ')?;
    let (host, port) = address.rsplit_once(':')?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    named(host, port.parse().ok()?, asked)
}

fn slot_number(value: &Value) -> Option<u16> {
    match value {
        Value::Int(number) => u16::try_from(*number).ok().filter(|slot| *slot < SLOTS),
        _ => None,
    }
}

/// A server of an answer. Without a name, it is the one that was asked.
fn server_of(value: &Value, asked: &Server) -> Option<Server> {
    let Value::Array(fields) = value else {
        return None;
    };
    let [host, Value::Int(port), ..] = &fields[..] else {
        return None;
    };
    let host = match host {
        Value::BulkString(bytes) => str::from_utf8(bytes).ok()?,
        Value::SimpleString(text) => text,
        Value::Nil => "",
        _ => return None,
    };
    let host = if host == "?" { "" } else { host };
    named(host, u16::try_from(*port).ok()?, asked)
}

/// The server that another one names; `None` if that is no name. Without one, it is the server `asked`.
fn named(host: &str, port: u16, asked: &Server) -> Option<Server> {
    let host = if host.is_empty() { &asked.host } else { host };
    is_host(host).then(|| Server {
        host: host.to_owned(),
        port,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: i64) -> Value {
        let host = Value::BulkString(host.into());
        Value::Array(vec![
            host,
            Value::Int(port),
            Value::BulkString(b"id".into()),
        ])
    }

    fn range(first: i64, last: i64, nodes: Vec<Value>) -> Value {
        let mut fields = vec![Value::Int(first), Value::Int(last)];
        fields.extend(nodes);
        Value::Array(fields)
    }

    fn asked() -> Server {
        "valkey://asked:1"
            .parse::<crate::StoreAddress>()
            .unwrap()
            .servers
            .remove(0)
    }

    #[test]
    fn slots_lead_to_their_primaries() {
        let answer = Value::Array(vec![
            range(5461, 10_922, vec![node("b", 2), node("x", 9)]),
            range(0, 5460, vec![node("", 1)]),
            range(10_923, 16_000, vec![node("b", 2)]),
        ]);
        let found = Topology::of_slots(&answer, &asked()).unwrap();
        assert_eq!(found.primaries.len(), 2);
        let name = |slot| found.primary(slot).map(ToString::to_string);
        assert_eq!(name(0).as_deref(), Some("asked:1"));
        assert_eq!(name(5460).as_deref(), Some("asked:1"));
        assert_eq!(name(5461).as_deref(), Some("b:2"));
        assert_eq!(name(16_000).as_deref(), Some("b:2"));
        assert_eq!(name(16_001), None);
    }

    #[test]
    fn who_was_replaced_is_not_believed() {
        let slots = Value::Array(vec![range(0, 16_383, vec![node("a", 1)])]);
        let says = |state: &str, epoch: u64| {
            let info = format!(
                "cluster_state:{state}\r\ncluster_known_nodes:6\r\ncluster_current_epoch:{epoch}\r\n"
            );
            let topology = Topology::of_slots(&slots, &asked()).unwrap();
            topology.with_state(&Value::BulkString(info.into_bytes()))
        };
        let known = says("ok", 6);
        assert!(says("ok", 6).replaces(Some(&known)) && says("ok", 7).replaces(Some(&known)));
        assert!(
            !says("ok", 5).replaces(Some(&known)),
            "a restored connection"
        );
        assert!(!says("fail", 6).replaces(Some(&known)), "cut off");
        assert!(says("fail", 7).replaces(Some(&known)));
        assert!(says("fail", 0).replaces(None), "better than nothing");
        // Without the right to ask, as before.
        let error = Value::Nil;
        let plain = Topology::of_slots(&slots, &asked()).unwrap();
        let unknown = plain.clone().with_state(&error);
        assert!(unknown == plain && unknown.replaces(Some(&plain)));
    }

    #[test]
    fn redirections_name_a_server() {
        let to = |detail| redirection(detail, &asked()).map(|server| server.to_string());
        assert_eq!(to("3999 b:2").as_deref(), Some("b:2"));
        assert_eq!(to("3999 :2").as_deref(), Some("asked:2"));
        assert_eq!(to("3999 ::1:2").as_deref(), Some("[::1]:2"));
        let long = format!("3999 {}:2", "b".repeat(256));
        let escape = "3999 \u{1b}]0;b:2";
        for wrong in ["3999", "3999 b", "3999 b:", "3999 b:70000", &long, escape] {
            assert_eq!(to(wrong), None, "{wrong:?}");
        }
    }

    /// So many primaries with a slot each.
    fn of_primaries(count: i64) -> Value {
        let slots = (0..count).map(|slot| range(slot, slot, vec![node("a", slot)]));
        Value::Array(slots.collect())
    }

    #[test]
    fn a_cluster_may_be_as_large_as_its_specification_allows() {
        let found = Topology::of_slots(&of_primaries(1000), &asked()).unwrap();
        assert_eq!(found.primaries.len(), 1000);
    }

    #[test]
    fn wrong_answers_are_refused() {
        for answer in [
            Value::Nil,
            Value::Array(vec![]),
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(0, 16_384, vec![node("a", 1)])]),
            Value::Array(vec![range(9, 8, vec![node("a", 1)])]),
            Value::Array(vec![range(-1, 8, vec![node("a", 1)])]),
            Value::Array(vec![range(0, 8, vec![])]),
            Value::Array(vec![range(0, 8, vec![node("a", 70_000)])]),
            Value::Array(vec![range(0, 8, vec![node(&"a".repeat(1 << 20), 1)])]),
            Value::Array(vec![range(0, 8, vec![node("a\nmemfold: forged", 1)])]),
            of_primaries(1001),
            Value::Array(vec![
                range(0, 8, vec![node("a", 1)]),
                range(8, 9, vec![node("b", 1)]),
            ]),
        ] {
            assert_eq!(Topology::of_slots(&answer, &asked()), None, "{answer:?}");
        }
    }

    #[test]
    fn the_hash_is_the_clusters() {
        // The value that the cluster specification gives.
        assert_eq!(slot_of("123456789"), 0x31c3);
    }
}
