//! What the tier makes of a store that fails now and then.

use super::*;

/// The batches of one call fail together, as a server that does not answer fails all of them.
#[test]
fn a_call_that_fails_is_one_failure() {
    let mut world = World::new(File::None);
    let stored = world.fill(1..257);
    world.store.arm(ModelFault::PutLost, 4);
    assert_eq!(world.write_back(), 0);
    assert_eq!(world.tier.usage().store_failures, 4);
    assert!(world.tier.is_paused());
    world.store.pass(Duration::from_millis(100));
    assert!(!world.tier.is_paused());
    assert_eq!(world.write_back(), 256);
    world.end(&stored);
}

/// One of several servers that fails, whichever batch is its.
#[test]
fn a_store_that_takes_some_batches_of_a_call_is_not_paused() {
    for failing in [0, 3] {
        let store = ModelStore::new(None);
        let backend = OneFails {
            store: store.clone(),
            failing,
        };
        let key = TierKey::new([9; 32]);
        let tier = RemoteTier::new(Box::new(backend), &key, RemoteConfig::default());
        let page = text(1);
        let pages: Vec<_> = (1..257).map(|slot| (Slot::from_raw(slot), &page)).collect();
        let mut placed = Vec::new();
        tier.store_batch(&pages, &mut Scratch::new(), &mut placed);
        let taken = placed.iter().filter(|one| one.is_ok()).count();
        assert_eq!((taken, store.records()), (192, 192));
        assert_eq!(tier.usage().store_failures, 1);
        assert!(!tier.is_paused(), "batch {failing}");
    }
}

/// A store of which one server does not answer: it does not take batch `failing` of a call.
struct OneFails {
    store: ModelStore,
    failing: u64,
}

impl RemoteBackend for OneFails {
    fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>> {
        let put = |(batch, index): (&Batch, u64)| {
            if index == self.failing {
                return Err(RemoteError::Unavailable("no answer in time"));
            }
            let (id, records) = (batch.id, batch.records.clone());
            self.store.put(&[Batch { id, records }])[0]
        };
        batches.iter().zip(0..).map(put).collect()
    }

    fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
        self.store.get(places)
    }

    fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>> {
        self.store.remove(removals)
    }

    fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>> {
        self.store.renew(batches)
    }

    fn now(&self) -> Duration {
        self.store.now()
    }

    fn sleep(&self, duration: Duration) {
        self.store.sleep(duration);
    }
}

#[test]
fn trouble_is_over_once_no_load_waits() {
    let mut world = World::new(File::None);
    let stored = world.fill(1..3);
    world.write_back();
    world.store.arm(ModelFault::GetUnavailable, 1);
    world.assert_all_right(&stored);
    let usage = world.tier.usage();
    assert_eq!((usage.retries, usage.trouble), (1, None));
    // A store that takes no pages is in trouble all the same.
    let more = world.fill(3..5);
    world.store.arm(ModelFault::Full, u64::MAX);
    world.write_back();
    world.store.arm(ModelFault::GetUnavailable, 1);
    world.assert_all_right(&stored);
    assert_eq!(world.tier.usage().trouble, Some(RemoteError::Full));
    let all: Vec<_> = stored.into_iter().chain(more).collect();
    world.end(&all);
}

/// A store that hangs holds up the one load that finds that out, and none after it.
#[test]
fn copies_are_read_first_until_the_store_answers() {
    let mut world = World::new(File::Copies);
    let stored = world.fill(1..100);
    world.write_back();
    world.store.arm(ModelFault::GetUnavailable, 2);
    world.assert_all_right(&stored);
    world.space.prefetch(stored.iter().map(|one| one.0));
    let usage = world.tier.usage();
    assert_eq!((world.store.happened(), usage.copies_read), (1, 99));
    assert!(usage.trouble.is_some());
    world.tier.maintain(&|| false);
    assert_eq!(world.store.happened(), 2, "it is asked again");
    world.assert_all_right(&stored);
    assert_eq!(world.tier.usage().copies_read, 2 * 99);
    world.tier.maintain(&|| false);
    assert_eq!(world.tier.usage().trouble, None);
    world.assert_all_right(&stored);
    assert_eq!(world.tier.usage().copies_read, 2 * 99);
    world.end(&stored);
}
