//! Every queued slot is released exactly once, by a worker, a helper or the caller.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use crate::common::{assert_empty, config, text};
use memfold_swap::{Gather, GatherConfig, Scratch, SlotRanges, SwapConfig, SwapSpace, fill};
use zsmalloc::HeapSource;

fn space() -> Arc<SwapSpace<HeapSource>> {
    let config = SwapConfig {
        pool_capacity_pages: 1 << 15,
        max_slots: 1 << 18,
        ..config()
    };
    Arc::new(SwapSpace::new(HeapSource::new(), config).unwrap())
}

fn store(space: &SwapSpace<HeapSource>, count: u64) -> SlotRanges {
    let mut scratch = Scratch::new();
    let mut page = text(1);
    (0..count)
        .map(|number| {
            if number % 4 == 0 {
                page = text(number);
            } else {
                fill(&mut page, number);
            }
            space.store(&page, &mut scratch).unwrap()
        })
        .collect()
}

#[test]
fn neighbours_take_one_range() {
    let space = space();
    let slots = store(&space, 2000);
    assert_eq!(slots.slots(), 2000);
    assert!(
        slots.as_slice().len() <= 2,
        "{} ranges",
        slots.as_slice().len()
    );
    space.release_ranges(slots.as_slice());
    assert_eq!(space.usage().slots_in_use, 0);
}

#[test]
fn few_slots_are_released_at_once_and_many_by_workers() {
    let space = space();
    let gather = Gather::new(Arc::clone(&space), GatherConfig::default());
    gather.release(store(&space, 100));
    assert_eq!(
        (space.usage().slots_in_use, gather.usage().released_at_once),
        (0, 100)
    );
    assert_eq!(gather.usage().workers, 0);
    gather.release(store(&space, 20_000));
    gather.flush();
    let usage = gather.usage();
    assert_eq!(
        (usage.released_at_once, usage.released_by_others),
        (100, 20_000)
    );
    assert_eq!((usage.backlog_slots, space.usage().slots_in_use), (0, 0));
}

#[test]
fn the_backlog_is_bounded() {
    let space = space();
    let config = GatherConfig {
        max_backlog: 5000,
        ..GatherConfig::default()
    };
    let gather = Gather::new(Arc::clone(&space), config);
    let slots = store(&space, 6000);
    gather.release(slots);
    assert_eq!(
        (space.usage().slots_in_use, gather.usage().released_at_once),
        (0, 6000)
    );
}

#[test]
fn workers_follow_the_backlog_and_end() {
    let space = space();
    let config = GatherConfig {
        max_workers: 3,
        slots_per_worker: 10_000,
        ..Default::default()
    };
    let gather = Gather::new(Arc::clone(&space), config);
    let slots = store(&space, 100_000);
    gather.release(store(&space, 1000));
    assert_eq!(gather.usage().workers, 1);
    gather.release(slots);
    assert_eq!(gather.usage().workers, 3);
    gather.flush();
    let patience = Instant::now() + Duration::from_secs(20);
    while gather.usage().workers > 0 {
        assert!(Instant::now() < patience, "workers stay for ever");
        std::thread::sleep(Duration::from_millis(20));
    }
    // And come back.
    gather.release(store(&space, 1000));
    gather.flush();
    assert_eq!(space.usage().slots_in_use, 0);
}

#[test]
fn dropping_a_gather_leaves_nothing_behind() {
    let space = space();
    let gather = Gather::new(Arc::clone(&space), GatherConfig::default());
    gather.release(store(&space, 50_000));
    drop(gather);
    assert_eq!(space.usage().slots_in_use, 0);
}

#[test]
fn many_bring_and_some_help() {
    let space = space();
    let config = GatherConfig {
        threshold: 64,
        max_workers: 2,
        slots_per_worker: 1000,
        max_backlog: 20_000,
    };
    let gather = Gather::new(Arc::clone(&space), config);
    let (send, receive) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (space, gather, send) = (&space, &gather, send.clone());
            scope.spawn(move || {
                let _running = send;
                for round in 0..60 {
                    gather.release(store(space, 30 + (round * 37 + thread * 11) % 3000));
                    if round % 16 == 0 {
                        gather.flush();
                    }
                }
            });
        }
        drop(send);
        let gather = &gather;
        scope.spawn(move || {
            while receive.recv_timeout(Duration::from_millis(1))
                == Err(mpsc::RecvTimeoutError::Timeout)
            {
                gather.help(500);
            }
        });
    });
    gather.flush();
    assert_empty(&space);
    let usage = space.usage();
    let done = gather.usage();
    assert_eq!(
        done.released_at_once + done.released_by_others,
        usage.pages_stored_total
    );
}
