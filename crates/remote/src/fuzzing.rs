//! What the fuzz target of a store's answers runs on its input. A test runs the same on the corpus.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use memfold_swap::{
    Batch, BatchId, PAGE_SIZE, Place, RemoteBackend, RemoteConfig, RemoteError, RemoteTier,
    Removal, ScanPolicy, Scratch, SwapConfig, SwapSpace, TierKey,
};
use redis::Value;
use zsmalloc::HeapSource;

use crate::{
    address::Server,
    answer::{AnswerReader, AnswerSize},
    failure::{Failure, asks, of_value},
    store::{Part, records, spread, was_renewed, was_stored},
    topology::{Topology, redirection},
};

/// Values of an input that are looked at.
const MOST_VALUES: usize = 64;
/// Pages that are stored.
const PAGES: u64 = 24;

/// What a store may say: the bytes of its answers, as they come from the network, and records in place of
/// those that it was given.
///
/// # Panics
/// If a page is loaded that is not the one that was stored, or what was said later spoils what is true.
pub fn answers(input: &[u8]) {
    let Some((mode, rest)) = input.split_first() else {
        return;
    };
    if mode & 1 == 0 {
        spoken(mode >> 1, rest);
    } else {
        forged(rest);
    }
}

/// The answers are taken apart as the store's are.
fn spoken(mode: u8, input: &[u8]) {
    let (counts, stream) = input.split_at(input.len().min(usize::from(mode & 7)));
    let mut reader = AnswerReader::new(stream);
    let mut values = Vec::new();
    while values.len() < MOST_VALUES {
        let Ok(value) = reader.read(AnswerSize::TEXT) else {
            break;
        };
        values.push(value);
    }
    let server = Server {
        host: "asked".to_owned(),
        port: 1,
    };
    for pair in values.windows(2) {
        let topology = Topology::of_slots(&pair[0], &server);
        if let Some(topology) = topology.map(|topology| topology.with_state(&pair[1])) {
            for slot in (0..16_384).step_by(37) {
                let primary = topology.primary(slot);
                assert!(primary.is_none_or(|primary| topology.primaries.contains(primary)));
            }
            assert!(topology.replaces(None));
        }
    }
    for value in &values {
        let _ = (
            of_value(value),
            asks(value).and_then(|text| redirection(text, &server)),
        );
    }
    let counts: Vec<usize> = counts.iter().map(|count| usize::from(count % 5)).collect();
    let replicas = u32::from(mode >> 3 & 3);
    let mut part = Part::default();
    part.of.extend(counts.iter().copied().enumerate());
    let wanted = counts.iter().sum::<usize>() + usize::from(replicas > 0);
    let said = if values.len() < wanted {
        let lost = RemoteError::Unavailable("the connection failed");
        Err(Failure::Connection(lost))
    } else {
        // As many as there are commands.
        Ok(values[..wanted].to_vec())
    };
    let none = Failure::Connection(RemoteError::Unavailable("no server has the slot"));
    let mut outcomes: Vec<Result<Vec<Value>, Failure>> = vec![Err(none); counts.len()];
    spread(said, &part, replicas, &mut outcomes);
    for (outcome, count) in outcomes.into_iter().zip(counts) {
        assert!(outcome.as_ref().is_ok_and(|own| own.len() == count) || outcome.is_err());
        assert_eq!(records(outcome.clone(), count).len(), count);
        let _ = was_stored(outcome.clone(), count);
        let _ = was_renewed(outcome);
    }
}

/// A store that returns what the input says, and what is true once that is over.
struct Forger {
    script: Mutex<Vec<u8>>,
    records: Mutex<HashMap<(BatchId, u8), Vec<u8>>>,
    milliseconds: AtomicU64,
}

impl Forger {
    fn record(&self, place: Place) -> Result<Option<Vec<u8>>, RemoteError> {
        let records = self.records.lock().expect("no panic");
        let held = records.get(&(place.batch, place.index)).cloned();
        let mut script = self.script.lock().expect("no panic");
        let Some(what) = script.pop() else {
            return Ok(held);
        };
        let mut next = || usize::from(script.pop().unwrap_or(0));
        match what % 6 {
            0 => Ok(held),
            1 => Ok(None),
            2 => Err(RemoteError::Unavailable("as the input says")),
            3 => {
                let length = next() * 16 + next();
                Ok(Some((0..length).map(|_| next() as u8).collect()))
            }
            4 => {
                let mut keys: Vec<_> = records.keys().copied().collect();
                keys.sort_unstable_by_key(|(batch, index)| (batch.into_raw(), *index));
                let other = keys.get(next() % keys.len().max(1));
                Ok(other.and_then(|key| records.get(key).cloned()))
            }
            _ => Ok(held.map(|mut record| {
                if let Some(byte) = record.get_mut(next() * 16 + next()) {
                    *byte ^= (next() | 1) as u8;
                }
                record
            })),
        }
    }
}

/// The tier's own reference, and the fuzz target's.
struct Shared(Arc<Forger>);

impl RemoteBackend for Shared {
    fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>> {
        let mut records = self.0.records.lock().expect("no panic");
        for batch in batches {
            for (index, record) in batch.records.iter().enumerate() {
                records.insert((batch.id, index as u8), record.clone());
            }
        }
        vec![Ok(()); batches.len()]
    }

    fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
        places.iter().map(|place| self.0.record(*place)).collect()
    }

    fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>> {
        vec![Ok(()); removals.len()]
    }

    fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>> {
        vec![Ok(true); batches.len()]
    }

    fn now(&self) -> Duration {
        Duration::from_millis(self.0.milliseconds.load(Relaxed))
    }

    fn sleep(&self, duration: Duration) {
        let milliseconds = duration.as_millis() as u64 + 1;
        self.0.milliseconds.fetch_add(milliseconds, Relaxed);
    }
}

fn page(number: u64) -> [u8; PAGE_SIZE] {
    let mut page = [number as u8; PAGE_SIZE];
    // Neither same-filled nor incompressible, and of many sizes.
    for (at, byte) in page.iter_mut().enumerate().take(number as usize * 150) {
        *byte = (at as u64)
            .wrapping_mul(number | 1)
            .wrapping_mul(0x9e37_79b9) as u8;
    }
    page
}

/// A page that is loaded is the one that was stored, whatever the store returns.
fn forged(script: &[u8]) {
    let forger = Arc::new(Forger {
        script: Mutex::default(),
        records: Mutex::default(),
        milliseconds: AtomicU64::new(1),
    });
    let mut config = RemoteConfig::default();
    config.patience = Duration::from_millis(50);
    let tier = RemoteTier::new(
        Box::new(Shared(Arc::clone(&forger))),
        &TierKey::new([7; 32]),
        config,
    );
    let space_config = SwapConfig {
        pool_capacity_pages: 256,
        max_slots: 1 << 10,
        shards: 1,
        ..SwapConfig::default()
    };
    let mut space = SwapSpace::new(HeapSource::new(), space_config).expect("a space");
    space.add_tier(Box::new(Arc::new(tier))).expect("a tier");
    let mut scratch = Scratch::new();
    let store = |number| {
        space
            .store(&page(number), &mut Scratch::new())
            .expect("room")
    };
    let slots: Vec<_> = (1..=PAGES).map(|number| (number, store(number))).collect();
    let policy = ScanPolicy {
        recompress: None,
        write_back: Some(1),
    };
    for _ in 0..2 {
        space.scan(policy, usize::MAX, &mut scratch);
    }
    assert_eq!(space.usage().remote_pages, PAGES, "all are sent");
    *forger.script.lock().expect("no panic") = script.iter().rev().copied().collect();
    let mut out = [0; PAGE_SIZE];
    let mut load_all = |must: bool| {
        for pages in slots.chunks(8) {
            space.prefetch(pages.iter().map(|(_, slot)| *slot));
            for (number, slot) in pages {
                match space.load(*slot, &mut out, &mut scratch) {
                    Ok(()) => assert!(out == page(*number), "page {number} is another"),
                    Err(error) => assert!(!must, "page {number}: {error}"),
                }
            }
        }
    };
    load_all(false);
    forger.script.lock().expect("no panic").clear();
    load_all(true);
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_store_may_say_anything() {
        memfold_testing::replay("answers", super::answers);
    }
}
