//! Threads that make memory dirty faster than a store on other machines takes it.
#![cfg(feature = "remote")]
#![allow(missing_docs, reason = "tests")]

use memfold_pager::embedded::{Config, Engine, Error, Mode, Region, Remote, Stats};
use memfold_pager::{Algorithm, Limit};
use memfold_swap::{
    Batch, BatchId, Place, RemoteBackend, RemoteConfig, RemoteError, RemoteTier, Removal, TierKey,
};
use memfold_testing::{Random, skip};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const LIMIT: u64 = 24 << 20;
const BYTES: usize = 64 << 20;
/// What a call with a batch of pages takes.
const SLOW: Duration = Duration::from_millis(6);

/// A store in this process that takes its time, or takes nothing.
#[derive(Clone)]
struct Store(Arc<Inner>);

struct Inner {
    records: Mutex<HashMap<Place, Vec<u8>>>,
    is_full: AtomicBool,
    start: Instant,
}

impl RemoteBackend for Store {
    fn put(&self, batches: &[Batch]) -> Vec<Result<(), RemoteError>> {
        let put = |batch: &Batch| {
            std::thread::sleep(SLOW);
            if self.0.is_full.load(Ordering::Relaxed) {
                return Err(RemoteError::Full);
            }
            let mut records = self.0.records.lock().unwrap();
            for (index, record) in (0..).zip(&batch.records) {
                let batch = batch.id;
                records.insert(Place { batch, index }, record.clone());
            }
            Ok(())
        };
        batches.iter().map(put).collect()
    }

    fn get(&self, places: &[Place]) -> Vec<Result<Option<Vec<u8>>, RemoteError>> {
        let records = self.0.records.lock().unwrap();
        let get = |place: &Place| Ok(records.get(place).cloned());
        places.iter().map(get).collect()
    }

    fn remove(&self, removals: &[Removal]) -> Vec<Result<(), RemoteError>> {
        let mut records = self.0.records.lock().unwrap();
        for removal in removals {
            let removes = |place: &Place| {
                let pages = removal.pages.unwrap_or(u64::MAX);
                place.batch == removal.batch && pages >> place.index & 1 == 1
            };
            records.retain(|place, _| !removes(place));
        }
        removals.iter().map(|_| Ok(())).collect()
    }

    fn renew(&self, batches: &[BatchId]) -> Vec<Result<bool, RemoteError>> {
        batches.iter().map(|_| Ok(true)).collect()
    }

    fn now(&self) -> Duration {
        self.0.start.elapsed()
    }

    fn sleep(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

/// An engine with a slow store; `None` if the host does not allow the mode.
fn engine(mode: Mode) -> Option<(Arc<Engine>, Store)> {
    let store = Store(Arc::new(Inner {
        records: Mutex::default(),
        is_full: AtomicBool::new(false),
        start: Instant::now(),
    }));
    let key = TierKey::new([3; 32]);
    let tier = RemoteTier::new(Box::new(store.clone()), &key, RemoteConfig::default());
    let config = Config {
        limit: Limit {
            total_bytes: Some(LIMIT),
            resident_bytes: None,
        },
        algorithm: Algorithm::Lz4,
        checksum: true,
        mode: Some(mode),
        readahead: true,
        remote: Some(Remote {
            tier: Arc::new(tier),
            owner: Arc::new(()),
        }),
    };
    match Engine::new(&config) {
        Ok(engine) => Some((Arc::new(engine), store)),
        Err(error @ Error::ModeUnavailable { .. }) => {
            skip(&error.to_string());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The words of a page, of which the first `noise` are noise.
fn words(page: usize, noise: usize) -> impl Iterator<Item = u64> {
    let mut random = Random::new(page as u64);
    (0..PAGE / 8).map(move |index| {
        if index < noise {
            random.next_word()
        } else {
            page as u64
        }
    })
}

/// Four threads write the region, as fast as they can.
fn write(region: &Region, noise: usize) {
    let (start, length) = (region.start().as_ptr() as usize, region.length());
    let part = length / 4;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                // SAFETY: this part of the region is this thread's alone.
                let part = unsafe {
                    std::slice::from_raw_parts_mut((start + thread * part) as *mut u64, part / 8)
                };
                for (index, words_of) in part.chunks_exact_mut(PAGE / 8).enumerate() {
                    let page = thread * (length / 4 / PAGE) + index;
                    for (place, word) in words_of.iter_mut().zip(words(page, noise)) {
                        *place = word;
                    }
                }
            });
        }
    });
}

#[track_caller]
fn assert_written(region: &Region, noise: usize) {
    // SAFETY: the writers have ended.
    let all = unsafe {
        std::slice::from_raw_parts(region.start().as_ptr() as *const u64, region.length() / 8)
    };
    for (page, found) in all.chunks_exact(PAGE / 8).enumerate() {
        assert!(found.iter().copied().eq(words(page, noise)), "page {page}");
    }
}

fn cpu_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: room for what the call writes.
    let usage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    let time = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Runs, while another thread looks at what the engine takes. Returns the most.
fn most_while(engine: &Engine, run: impl FnOnce()) -> u64 {
    let total = |stats: Stats| stats.resident_bytes + stats.pool_bytes + stats.metadata_bytes;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let (mut most, mut samples) = (0, 0);
            while !done.load(Ordering::Relaxed) {
                let began = Instant::now();
                let sampled = total(engine.stats());
                // A sample that was interrupted adds up statistics of different moments.
                if began.elapsed() < Duration::from_millis(1) {
                    most = most.max(sampled);
                    samples += 1;
                }
                std::thread::sleep(Duration::from_micros(300));
            }
            assert!(samples > 100, "{samples} samples");
            most
        });
        run();
        done.store(true, Ordering::Relaxed);
        sampler.join().unwrap()
    })
}

/// Writes to a store that is slow, then to one that is full. Whether this process waited rather than computed; `None` if the
/// host does not allow the mode.
fn has_waited(mode: Mode, noise: usize) -> Option<bool> {
    let (engine, store) = engine(mode)?;
    let case = format!("{mode}, {noise} words of noise");
    let region = engine.map(BYTES).unwrap();
    let (began, before) = (Instant::now(), cpu_time());
    let most = most_while(&engine, || write(&region, noise));
    let (took, cpu) = (began.elapsed(), cpu_time().saturating_sub(before));
    let stats = engine.stats();
    // Three moments of one sample, and pages on their way from the pool to the store.
    assert!(most <= LIMIT + (2 << 20), "{case}: {most} {stats:?}");
    assert!(stats.remote_room_waits > 0, "{case}: {stats:?}");
    assert_eq!(stats.over_limit_pages, 0, "{case}: {stats:?}");
    let to_send = stats.remote_pages_out as u32 / 64;
    assert!(took > SLOW * to_send / 2, "{case}: {took:?} {stats:?}");
    assert_written(&region, noise);

    store.0.is_full.store(true, Ordering::Relaxed);
    let more = engine.map(BYTES / 4).unwrap();
    let began = Instant::now();
    write(&more, PAGE / 16);
    assert!(began.elapsed() < Duration::from_secs(20), "{case}");
    assert_written(&more, PAGE / 16);
    store.0.is_full.store(false, Ordering::Relaxed);
    assert_written(&region, noise);
    assert_eq!(engine.stats().remote_lost_pages, 0);
    println!("{case}: {cpu:?} of {took:?}");
    Some(cpu < took * 3 / 4)
}

/// One after the other: CPU time is the process's.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn writers_wait_for_a_slow_store_but_not_for_one_that_is_full() {
    for mode in [Mode::Signal, Mode::Thread] {
        // Half of each page is noise, or all of it.
        for noise in [PAGE / 16, PAGE / 8] {
            // A virtual machine may count as CPU time what its host takes.
            let is_any = (0..3).any(|_| has_waited(mode, noise).unwrap_or(true));
            assert!(is_any, "{mode}, {noise} words of noise: writers compute");
        }
    }
}
