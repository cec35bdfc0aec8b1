//! The heap refuses memory, at every step in turn: the pool reports it, and nothing is lost.

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use common::contents;
use zsmalloc::{AllocError, Config, HandleError, HandleTable, HeapSource, PAGE_SIZE, Pool};

/// The system's allocator, which refuses a thread everything from some allocation on.
struct Refusing;

thread_local! {
    /// Allocations that this thread still gets; `None`: all.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn refused() -> bool {
    LEFT.with(|left| match left.get() {
        None => false,
        Some(0) => true,
        Some(some) => {
            left.set(Some(some - 1));
            false
        }
    })
}

// SAFETY: every call forwards to the system allocator or returns null, which is allowed.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if refused() {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if refused() {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if refused() {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise is the same.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the block was allocated by the system allocator, through the methods above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

/// Does `work` with a heap that gives this thread `allocations` blocks and no more.
fn with_allocations<T>(allocations: usize, work: impl FnOnce() -> T) -> T {
    LEFT.set(Some(allocations));
    let result = work();
    LEFT.set(None);
    result
}

fn config() -> Config {
    Config::with_capacity_pages(1 << 14).shards(2)
}

#[test]
fn a_pool_is_made_or_refused() {
    let mut refusals = 0;
    loop {
        let result = with_allocations(refusals, || Pool::new(HeapSource::new(), config()));
        match result {
            Err(error) => {
                assert!(!error.to_string().is_empty());
                refusals += 1;
            }
            Ok(pool) => {
                let word = pool.store(&[b"it works"]).unwrap();
                pool.free(word);
                break;
            }
        }
    }
    assert!(refusals > 5, "there is hardly an allocation to refuse");
}

/// Objects are stored, freed in all ways, and stored again while the heap gives less and less.
#[test]
fn a_pool_without_records_loses_nothing() {
    let objects: Vec<Vec<u8>> = (0..400)
        .map(|n| contents(n, 1 + n as usize * 997 % PAGE_SIZE))
        .collect();
    let mut refused_at = Vec::new();
    for allocations in 0.. {
        let pool = Pool::new(HeapSource::new(), config()).unwrap();
        let mut stored = Vec::with_capacity(objects.len() * 2);
        let mut freed = Vec::with_capacity(objects.len());
        let mut refused = 0;
        with_allocations(allocations, || {
            for round in 0..2 {
                for (number, object) in objects.iter().enumerate() {
                    match pool.store(&[object]) {
                        Ok(word) => stored.push((number, word)),
                        Err(AllocError::Metadata) => refused += 1,
                        Err(error) => panic!("{error}"),
                    }
                }
                // Frees, whatever their way, need no memory.
                if round == 0 {
                    freed.extend(stored.drain(..stored.len() / 2).map(|(_, word)| word));
                    let third = freed.len() / 3;
                    let (one, rest) = freed.split_at_mut(third);
                    let (deferred, bulk) = rest.split_at_mut(third);
                    one.iter().for_each(|&word| pool.free(word));
                    deferred.iter().for_each(|&word| pool.free_deferred(word));
                    pool.free_bulk(bulk);
                    assert_eq!(pool.flush_deferred(), Ok(deferred.len()));
                    pool.trim();
                }
            }
        });
        for &(number, word) in &stored {
            let object = &objects[number];
            pool.read_slot(word, |slot| assert!(slot[..object.len()] == object[..]));
        }
        common::check_stats(&pool, stored.iter().map(|&(n, _)| objects[n].len()));
        stored.into_iter().for_each(|(_, word)| pool.free(word));
        pool.trim();
        assert_eq!(pool.resident_bytes(), 0);
        refused_at.push(refused);
        if refused == 0 {
            break;
        }
    }
    assert_eq!(refused_at[0], objects.len() * 2);
    assert!(
        refused_at.is_sorted_by(|one, other| one >= other) && refused_at.len() > 8,
        "{refused_at:?}"
    );
}

#[test]
fn many_words_are_freed_without_memory() {
    let pool = Pool::new(HeapSource::new(), config()).unwrap();
    let bytes = |n: usize| contents(n as u64, 1 + n * 997 % PAGE_SIZE);
    for allocations in 0..3 {
        let kept = pool.store(&[&bytes(7)]).unwrap();
        let mut words: Vec<_> = (0..5000)
            .map(|n| pool.store(&[&bytes(n)]).unwrap())
            .collect();
        with_allocations(allocations, || pool.free_bulk(&mut words));
        common::check_stats(&pool, [bytes(7).len()].into_iter());
        pool.read_slot(kept, |slot| assert!(slot.starts_with(&bytes(7))));
        pool.free(kept);
    }
}

#[test]
fn a_handle_table_without_records_loses_nothing() {
    for allocations in 0.. {
        let table = HandleTable::new(HeapSource::new(), config()).unwrap();
        let mut stored = Vec::with_capacity(300);
        let mut refused = 0;
        with_allocations(allocations, || {
            for n in 0..300_usize {
                match table.store(&[n as u8; 700]) {
                    Ok(handle) => stored.push((handle, n as u8)),
                    Err(_) => refused += 1,
                }
            }
            table.compact(|| true);
        });
        for (handle, byte) in stored {
            table
                .read(handle, |bytes| assert_eq!(bytes, [byte; 700]))
                .unwrap();
            table.free(handle).unwrap();
            assert_eq!(table.free(handle), Err(HandleError(handle)));
        }
        assert_eq!(table.pool().stats().objects_used(), 0);
        if refused == 0 {
            assert!(allocations > 1);
            break;
        }
    }
}
