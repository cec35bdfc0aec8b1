//! The C functions, called from Rust.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use memfold::Stats;
use memfold_capi::{
    MEMFOLD_ERROR_ARGUMENT, MEMFOLD_ERROR_FORKED, MEMFOLD_ERROR_REMOTE, MEMFOLD_ERROR_SYSTEM,
    MEMFOLD_PAGE_OUT, memfold_advise, memfold_error_message, memfold_free, memfold_get_stats,
    memfold_is_handler_installed, memfold_map, memfold_new, memfold_options,
    memfold_reinstall_handlers, memfold_stats, memfold_unmap, memfold_unpin,
};
use memfold_testing::store::{StoreServer, has_store, store_programs};
use memfold_testing::{Random, skip};
use std::ffi::{CStr, CString, c_void};
use std::path::Path;

/// Held by each test: what one maps and unmaps must not change where another one's regions lie.
static ADDRESSES: Mutex<()> = Mutex::new(());

/// In a child, a large region lies over where its parent had small ones.
#[test]
fn a_child_advises_on_its_own_regions() {
    const PART: usize = 2 << 20;
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: pointers to what lives here; regions are touched only by the calls. The child calls
    // this library alone, none of whose locks is held, and exits without destructors.
    unsafe {
        let limit = || {
            let mut limit = std::ptr::null_mut();
            assert_eq!(memfold_new(std::ptr::null(), &raw mut limit), 0);
            limit
        };
        let map = |limit, bytes| {
            let mut start = std::ptr::null_mut();
            assert_eq!(memfold_map(limit, bytes, &raw mut start), 0);
            start
        };
        let parents = limit();
        // Enough that stacks and heaps of the child's threads do not fill their place.
        let starts: Vec<_> = (0..64).map(|_| map(parents, PART)).collect();
        let lowest = *starts.iter().min().unwrap();
        let anywhere = std::ptr::null_mut::<c_void>();
        let reserve = |at: *mut c_void, bytes| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let fixed = libc::MAP_FIXED_NOREPLACE * i32::from(!at.is_null());
            libc::mmap(at, bytes, libc::PROT_NONE, flags | fixed, -1, 0)
        };
        let child = libc::fork();
        if child == 0 {
            let run = || {
                // Held while the rest above is filled: the kernel takes the highest room.
                for start in &starts {
                    assert_eq!(reserve(*start, PART), *start, "free in a child");
                }
                let own = limit();
                for bits in (23..46).rev() {
                    let fill = || Some(reserve(anywhere, 1 << bits));
                    let below =
                        std::iter::from_fn(fill).find(|at| *at < lowest || *at == libc::MAP_FAILED);
                    // (Unmapping what was not mapped is refused.)
                    libc::munmap(below.expect("an end"), 1 << bits);
                }
                for start in &starts {
                    assert_eq!(libc::munmap(*start, PART), 0);
                }
                let covering = (0..8).map(|_| map(own, 4 * PART)).find(|start| {
                    let range = *start..start.byte_add(4 * PART);
                    starts.iter().filter(|start| range.contains(*start)).count() > 1
                });
                let Some(start) = covering else {
                    return 2;
                };
                let advised = (0..8).all(|half| {
                    let half = start.byte_add(half * PART / 2);
                    memfold_advise(half, 4096, MEMFOLD_PAGE_OUT) == 0
                });
                i32::from(!advised)
            };
            libc::_exit(std::panic::catch_unwind(run).unwrap_or(3));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        let code = libc::WEXITSTATUS(status);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        assert_ne!(
            code, 2,
            "no region of the child's lies over two of its parent's"
        );
        assert_eq!(code, 0, "taken for a region of the parent's?");
        for start in starts {
            assert_eq!(memfold_unmap(start), 0);
        }
        memfold_free(parents);
    }
}

/// The header has a member for each value; this is where they must lie.
#[test]
fn statistics_are_those_of_the_rust_library() {
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: pointers to what lives here.
    unsafe {
        let mut limit = std::ptr::null_mut();
        assert_eq!(memfold_new(std::ptr::null(), &raw mut limit), 0);
        let mut start = std::ptr::null_mut();
        assert_eq!(memfold_map(limit, 3 << 20, &raw mut start), 0);
        let mut stats: memfold_stats = std::mem::zeroed();
        assert_eq!(
            memfold_get_stats(limit, &raw mut stats),
            -1,
            "without a size"
        );
        stats.size = size_of::<memfold_stats>();
        assert_eq!(memfold_get_stats(limit, &raw mut stats), 0);
        let mapped = Stats::FIELDS
            .iter()
            .position(|field| field.name == "mapped_bytes");
        assert_eq!(stats.values[mapped.unwrap()], 3 << 20);
        let first = std::mem::offset_of!(memfold_stats, values);
        assert_eq!(first, size_of::<usize>() + size_of::<u64>(), "no gaps in C");
        // An older header's structure ends earlier.
        stats.size = first + 8;
        stats.values = [9; Stats::FIELDS.len()];
        assert_eq!(memfold_get_stats(limit, &raw mut stats), 0);
        assert_ne!(stats.values[0], 9);
        assert!(stats.values[1..].iter().all(|value| *value == 9));
        assert_eq!(memfold_unmap(start), 0);
        memfold_free(limit);
    }
}

/// The options of C with a limit of 24 MiB and a store.
fn with_store(address: &CStr, password: &CStr) -> memfold_options {
    // SAFETY: zeros mean the defaults.
    let mut options: memfold_options = unsafe { std::mem::zeroed() };
    options.size = size_of::<memfold_options>();
    options.limit_bytes = 24 << 20;
    options.remote = address.as_ptr();
    options.remote_password = password.as_ptr();
    options
}

/// Has pages go to a store and come back. Returns how many calls to it failed; `None` if the host does not allow it.
fn use_a_store(folder: &Path) -> Option<u64> {
    const BYTES: usize = 64 << 20;
    const PAGE: usize = 4096;
    let server = StoreServer::start(folder, &["--requirepass", "secret"]);
    let address = CString::new(format!("valkey://127.0.0.1:{}", server.port)).unwrap();
    let options = with_store(&address, c"secret");
    // SAFETY: pointers to what lives here; the region is this thread's.
    let failures = unsafe {
        let (mut limit, mut start) = (std::ptr::null_mut(), std::ptr::null_mut());
        let made = memfold_new(&raw const options, &raw mut limit);
        if made == MEMFOLD_ERROR_SYSTEM {
            let why = CStr::from_ptr(memfold_error_message()).to_string_lossy();
            assert!(why.contains("userfaultfd"), "{why}");
            skip(&why);
            return None;
        }
        assert_eq!(made, 0, "{:?}", CStr::from_ptr(memfold_error_message()));
        assert_eq!(memfold_map(limit, BYTES, &raw mut start), 0);
        let words = std::slice::from_raw_parts_mut(start.cast::<u64>(), BYTES / 8);
        let mut random = Random::new(5);
        words.fill_with(|| random.next_word() >> 32);
        let mut random = Random::new(5);
        assert!(words.iter().all(|word| *word == random.next_word() >> 32));
        // Once in order brings whole windows in with a fault; at random, each page has its own.
        let of_page = |page: usize| page * PAGE / 8;
        let firsts: Vec<u64> = (0..BYTES / PAGE).map(|page| words[of_page(page)]).collect();
        for _ in 0..BYTES / PAGE {
            let page = random.below(BYTES / PAGE);
            assert_eq!(words[of_page(page)], firsts[page]);
        }
        let mut stats: memfold_stats = std::mem::zeroed();
        stats.size = size_of::<memfold_stats>();
        assert_eq!(memfold_get_stats(limit, &raw mut stats), 0);
        let value = |name: &str| {
            let at = Stats::FIELDS.iter().position(|field| field.name == name);
            stats.values[at.unwrap()]
        };
        for name in ["pages", "bytes", "pages_out", "pages_in", "faults"] {
            assert!(value(&format!("remote_{name}")) > 1000, "{name}: {stats:?}");
        }
        assert_eq!(value("remote_lost_pages"), 0);
        assert_eq!(memfold_unmap(start), 0);
        memfold_free(limit);
        value("remote_failures")
    };
    assert_eq!(server.ask(&["DBSIZE"]), "0");
    Some(failures)
}

#[test]
fn pages_go_to_a_store_and_are_counted() {
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    if !has_store() {
        return skip(&store_programs().join(" and "));
    }
    let folder = tempfile::tempdir().unwrap();
    // A server without a CPU does not answer in time.
    let is_any_without = (0..3).any(|_| use_a_store(folder.path()).unwrap_or(0) == 0);
    assert!(is_any_without, "calls fail");
}

#[test]
fn a_store_that_cannot_be_used_is_an_error() {
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    let new = |options: &memfold_options| {
        let mut limit = std::ptr::null_mut();
        // SAFETY: pointers to what lives here.
        unsafe {
            let code = memfold_new(options, &raw mut limit);
            let message = CStr::from_ptr(memfold_error_message());
            (code, message.to_string_lossy().into_owned())
        }
    };
    let (code, message) = new(&with_store(c"http://x", c"secret"));
    assert_eq!(code, MEMFOLD_ERROR_ARGUMENT, "{message}");
    assert!(message.contains("options.remote \"http://x\""), "{message}");
    let (code, message) = new(&with_store(c"valkey://x", c"\xff"));
    assert_eq!(code, MEMFOLD_ERROR_ARGUMENT, "{message}");
    assert!(message.contains("options.remote_password"), "{message}");
    let (code, message) = new(&with_store(c"valkey://127.0.0.1:1", c""));
    assert_eq!(code, MEMFOLD_ERROR_REMOTE, "{message}");
    let mut short_lived = with_store(c"valkey://127.0.0.1:1", c"");
    short_lived.remote_time_to_live_seconds = 60;
    let (code, message) = new(&short_lived);
    assert_eq!(code, MEMFOLD_ERROR_ARGUMENT, "{message}");
    assert!(message.contains("time to live"), "{message}");
    // The options of an older header end before the store's.
    let mut older = with_store(c"http://x", c"");
    older.size = std::mem::offset_of!(memfold_options, remote);
    let mut limit = std::ptr::null_mut();
    // SAFETY: pointers to what lives here.
    unsafe {
        assert_eq!(memfold_new(&raw const older, &raw mut limit), 0);
        memfold_free(limit);
    }
}

extern "C" fn fail_late(_: *mut c_void) {
    // SAFETY: no region; the message is a string of the library's.
    unsafe {
        let code = memfold_unmap(std::ptr::null_mut());
        let message = CStr::from_ptr(memfold_error_message());
        let is_right = code == MEMFOLD_ERROR_ARGUMENT && !message.is_empty();
        libc::_exit(if is_right { 7 } else { 8 });
    }
}

/// When a thread ends, its keys' destructors run after its message is gone.
#[test]
fn a_call_may_fail_while_its_thread_ends() {
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the child's thread makes a key, and ends the child in the key's destructor.
    let status = unsafe {
        let child = libc::fork();
        if child == 0 {
            let thread = std::thread::spawn(|| {
                memfold_unmap(std::ptr::null_mut());
                let mut key = 0;
                libc::pthread_key_create(&raw mut key, Some(fail_late));
                libc::pthread_setspecific(key, (&raw const ADDRESSES).cast());
            });
            let _ = thread.join();
            libc::_exit(9);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        status
    };
    assert!(libc::WIFEXITED(status), "{status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 7);
}

/// A fork may find another thread in the midst of a call.
#[test]
fn a_child_of_a_threaded_program_does_not_wait_for_its_parents_threads() {
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    let done = AtomicBool::new(false);
    let map = |limit| {
        let mut start = std::ptr::null_mut();
        // SAFETY: pointers to what lives here.
        unsafe {
            assert_eq!(memfold_map(limit, 1 << 20, &raw mut start), 0);
            assert_eq!(memfold_unmap(start), 0);
        }
    };
    let new = || {
        let mut limit = std::ptr::null_mut();
        // SAFETY: as above.
        assert_eq!(unsafe { memfold_new(std::ptr::null(), &raw mut limit) }, 0);
        limit
    };
    let child = || {
        // SAFETY: a number.
        unsafe { libc::alarm(10) };
        map(new());
        0
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let limit = new();
            while !done.load(Ordering::Relaxed) {
                map(limit);
            }
            // SAFETY: not used any more.
            unsafe { memfold_free(limit) };
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                // SAFETY: no region.
                assert_ne!(unsafe { memfold_unmap(std::ptr::null_mut()) }, 0);
            }
        });
        for _ in 0..20 {
            // SAFETY: the child calls this library alone, and exits without destructors.
            let status = unsafe {
                let forked = libc::fork();
                if forked == 0 {
                    libc::_exit(child());
                }
                let mut status = 0;
                assert_eq!(libc::waitpid(forked, &raw mut status, 0), forked);
                status
            };
            if status != 0 {
                done.store(true, Ordering::Relaxed);
            }
            assert_eq!(status, 0, "{status:#x}");
        }
        done.store(true, Ordering::Relaxed);
    });
}

extern "C" fn end_by_a_signal(_: i32) {
    // SAFETY: ends a child.
    unsafe { libc::_exit(5) };
}

/// As after a library has installed a handler of its own, which knows no regions.
#[test]
fn handlers_can_be_put_above_those_of_other_libraries() {
    const PAGE: usize = 4096;
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: pointers to what lives here; the region is the child's, which calls this library alone, none of whose
    // locks is held, and exits without destructors.
    unsafe {
        let null = memfold_is_handler_installed(std::ptr::null());
        assert_eq!(null, MEMFOLD_ERROR_ARGUMENT);
        let child = libc::fork();
        if child == 0 {
            let run = || {
                let (mut limit, mut start) = (std::ptr::null_mut(), std::ptr::null_mut());
                assert_eq!(memfold_new(std::ptr::null(), &raw mut limit), 0);
                assert_eq!(memfold_map(limit, PAGE, &raw mut start), 0);
                let byte = start.cast::<u8>();
                byte.write_volatile(7);
                assert_eq!(memfold_is_handler_installed(limit), 1);
                let foreign = end_by_a_signal as *const () as libc::sighandler_t;
                for signal in [libc::SIGBUS, libc::SIGSEGV] {
                    libc::signal(signal, foreign);
                }
                assert_eq!(memfold_is_handler_installed(limit), 0);
                assert_eq!(memfold_reinstall_handlers(), 0);
                assert_eq!(memfold_is_handler_installed(limit), 1);
                assert_eq!(memfold_advise(start, PAGE, MEMFOLD_PAGE_OUT), 0);
                assert_eq!(byte.read_volatile(), 7);
                0
            };
            libc::_exit(std::panic::catch_unwind(run).unwrap_or(3));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0, "{status:#x}");
    }
}

/// What is wrong of a child's own region is an error. Its parent's are unmapped there, and pinned no more.
#[test]
fn a_child_is_told_of_mistakes_with_its_own_regions() {
    const PAGE: usize = 4096;
    const BYTES: usize = 1 << 20;
    let _alone = ADDRESSES.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: pointers to what lives here; regions are touched only by the calls. The child calls
    // this library alone, none of whose locks is held, and exits without destructors.
    unsafe {
        let map = || {
            let (mut limit, mut start) = (std::ptr::null_mut(), std::ptr::null_mut());
            assert_eq!(memfold_new(std::ptr::null(), &raw mut limit), 0);
            assert_eq!(memfold_map(limit, BYTES, &raw mut start), 0);
            (limit, start)
        };
        let (limit, parents) = map();
        let child = libc::fork();
        if child == 0 {
            let run = || {
                let code = memfold_advise(parents, PAGE, MEMFOLD_PAGE_OUT);
                assert_eq!(code, MEMFOLD_ERROR_FORKED);
                assert_eq!(memfold_unpin(parents, PAGE), 0);
                assert_eq!(memfold_unmap(parents), 0);
                // It may lie where the parent's does.
                let (_, own) = map();
                for code in [
                    memfold_unpin(own, PAGE),
                    memfold_unmap(own.byte_add(PAGE)),
                    memfold_advise(own.byte_add(BYTES), PAGE, MEMFOLD_PAGE_OUT),
                ] {
                    assert_eq!(code, MEMFOLD_ERROR_ARGUMENT);
                }
                assert_eq!(memfold_unmap(own), 0);
                0
            };
            libc::_exit(std::panic::catch_unwind(run).unwrap_or(3));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        assert_eq!(status, 0, "{status:#x}");
        assert_eq!(memfold_unmap(parents), 0);
        memfold_free(limit);
    }
}
