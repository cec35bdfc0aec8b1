//! Loads of pages while they move to another tier.

use std::sync::{
    Arc, Mutex, Weak,
    atomic::{AtomicU64, Ordering::Relaxed},
    mpsc::{Receiver, channel},
};
use std::time::{Duration, Instant};

use crate::common::{MemoryFile, config, noise};
use memfold_swap::{
    LoadError, Location, PAGE_SIZE, Page, Placed, ScanPolicy, Scratch, Slot, StoreError, Stored,
    SwapSpace, Tier, TierKind,
};
use zsmalloc::HeapSource;

/// Longer than any thread is kept from a CPU.
const LONG: Duration = Duration::from_secs(10);

type Act = Arc<Mutex<Box<dyn FnMut() + Send>>>;

/// A tier that counts its loads, and acts where the place of a page is about to change.
struct Watched {
    inner: Box<dyn Tier>,
    loads: Arc<AtomicU64>,
    act: Act,
}

impl Tier for Watched {
    fn kind(&self) -> TierKind {
        self.inner.kind()
    }

    fn store(&self, slot: Slot, page: &Page, scratch: &mut Scratch) -> Result<Placed, StoreError> {
        self.inner.store(slot, page, scratch)
    }

    fn load(
        &self,
        stored: Stored<'_>,
        out: &mut Page,
        scratch: &mut Scratch,
    ) -> Result<(), LoadError> {
        let loaded = self.inner.load(stored, out, scratch);
        self.loads.fetch_add(1, Relaxed);
        loaded
    }

    fn free(&self, locations: &mut [Location]) {
        self.inner.free(locations);
    }

    fn bytes(&self, location: Location) -> u64 {
        if self.kind() == TierKind::File {
            (self.act.lock().unwrap())();
        }
        self.inner.bytes(location)
    }
}

#[test]
fn a_load_waits_for_the_move_of_its_page_and_not_for_others() {
    // A thread that is kept from a CPU for a tenth of a second in the wrong moment makes the load wait for both.
    assert!((0..5).any(|_| is_loaded_beside_another_move()));
}

/// Whether a page is loaded that just moves, while another move is under way. An incompressible page has its checksum in its
/// annex word, which the file overwrites before the entry changes.
fn is_loaded_beside_another_move() -> bool {
    let loads = Arc::new(AtomicU64::new(0));
    let act: Act = Arc::new(Mutex::new(Box::new(|| ())));
    let watch = |inner| -> Box<dyn Tier> {
        let (loads, act) = (loads.clone(), act.clone());
        Box::new(Watched { inner, loads, act })
    };
    let mut space = SwapSpace::with_tiers(HeapSource::new(), config(), |tier| match tier.kind() {
        TierKind::Uncompressed => watch(tier),
        _ => tier,
    })
    .unwrap();
    let file = MemoryFile::default().tier(1 << 20);
    space.add_tier(watch(Box::new(file))).unwrap();
    let space = Arc::new(space);
    let mut scratch = Scratch::new();
    let [first, _] = [1, 2].map(|seed| space.store(&noise(seed), &mut scratch).unwrap());
    let policy = ScanPolicy {
        recompress: None,
        write_back: Some(1),
    };
    space.scan(policy, usize::MAX, &mut scratch);
    let was_loaded = Arc::new(AtomicU64::new(0));
    let mut loading = None;
    let (weak, counter) = (Arc::downgrade(&space), was_loaded.clone());
    *act.lock().unwrap() = Box::new(move || match loading.take() {
        // The first page moves: its load fails before.
        None => loading = Some(start_load(&weak, first, &loads)),
        // The second, while no other move can begin.
        Some(done) => {
            let page = done.recv_timeout(Duration::from_secs(2));
            counter.fetch_add(u64::from(page == Ok(Ok(noise(1)))), Relaxed);
        }
    });
    assert_eq!(space.scan(policy, usize::MAX, &mut scratch).moved, 2);
    was_loaded.load(Relaxed) == 1
}

/// Starts to load a page in a thread, and waits until it has tried.
fn start_load(
    space: &Weak<SwapSpace<HeapSource>>,
    slot: Slot,
    loads: &AtomicU64,
) -> Receiver<Result<Page, LoadError>> {
    let space = space.upgrade().unwrap();
    let (done, receiver) = channel();
    let before = loads.load(Relaxed);
    std::thread::spawn(move || {
        let mut page = [0; PAGE_SIZE];
        let loaded = space.load(slot, &mut page, &mut Scratch::new());
        let _ = done.send(loaded.map(|()| page));
    });
    let began = Instant::now();
    while loads.load(Relaxed) == before {
        assert!(began.elapsed() < LONG, "the page was not loaded");
        std::thread::yield_now();
    }
    receiver
}
