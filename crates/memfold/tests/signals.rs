//! Faults beside the program's own signals, stacks and forks. One test at a time uses the process's
//! handlers, so all of it is one test.

mod common;

use allocator_api2::alloc::{Allocator, Layout};
use common::{MIB, PAGE, builder, fill_page, forked, verify_page};
use memfold::{Memfold, Mode, Region};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

static SEEN: AtomicUsize = AtomicUsize::new(0);
static REGION: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
static READ: AtomicUsize = AtomicUsize::new(0);
/// Threads in the handler. A signal of a process may come late, and in any thread.
static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// A program's own handler: makes the page that was touched accessible, and counts.
extern "C" fn own_handler(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    SEEN.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the address of the fault, whose page is replaced by an anonymous one.
    unsafe {
        let page = (*info).si_addr() as usize & !(PAGE - 1);
        libc::mmap(
            page as *mut libc::c_void,
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        );
    }
}

/// A handler that touches region memory, while there is some.
extern "C" fn touching_handler(_: i32) {
    INSIDE.fetch_add(1, Ordering::SeqCst);
    let start = REGION.load(Ordering::SeqCst);
    if !start.is_null() {
        let number = READ.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the region lives until no thread accesses it; the page is read only.
        let byte = unsafe { start.add(number % 256 * PAGE).read_volatile() };
        if byte != 0x5a {
            std::process::abort();
        }
    }
    INSIDE.fetch_sub(1, Ordering::SeqCst);
}

fn set_handler(signal: i32, handler: usize, flags: i32) {
    // SAFETY: a zeroed action with a handler of the type that the flags say.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        assert_eq!(
            libc::sigaction(signal, &raw const action, std::ptr::null_mut()),
            0
        );
    }
}

/// Has SIGALRM come at an interval; zero ends that.
fn set_timer(interval: Duration) {
    let interval = libc::timeval {
        tv_sec: 0,
        tv_usec: interval.as_micros() as libc::suseconds_t,
    };
    let timer = libc::itimerval {
        it_interval: interval,
        it_value: interval,
    };
    // SAFETY: a live structure.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
}

/// A page of a mapping behind the end of its file: touching it raises a SIGBUS that is not ours.
fn page_behind_a_file() -> *const u8 {
    let file = tempfile::tempfile().unwrap();
    // SAFETY: a new mapping where the kernel likes.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    page.cast()
}

/// For a forked child, which ends where it cannot have one.
fn own_region(mode: Mode) -> (Memfold, Region) {
    let Ok(own) = builder(mode).limit(64 * MIB as u64).build() else {
        // SAFETY: ends the child without destructors.
        unsafe { libc::_exit(2) }
    };
    let Ok(region) = own.map(MIB) else {
        // SAFETY: as above.
        unsafe { libc::_exit(3) }
    };
    (own, region)
}

fn paged_out(region: &mut Region, byte: u8) {
    region.fill(byte);
    // Not all alike: same-filled pages would never see the codec.
    for page in region.chunks_exact_mut(PAGE) {
        page[PAGE / 2] = 1;
    }
    region.page_out(..).unwrap();
}

fn signals_of_the_program_get_through(mode: Mode) {
    let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
    let mut region = memfold.map(MIB).unwrap();
    paged_out(&mut region, 0x5a);
    assert!(memfold.is_handler_installed());
    let before = SEEN.load(Ordering::Relaxed);
    // SAFETY: a mapping of this process; the handler replaces the page by zeros.
    let byte = unsafe { page_behind_a_file().read_volatile() };
    assert_eq!((byte, SEEN.load(Ordering::Relaxed)), (0, before + 1));
    assert!(region.chunks_exact(PAGE).all(|page| page[0] == 0x5a));
    assert_eq!(SEEN.load(Ordering::Relaxed), before + 1);
}

fn handlers_may_touch_regions(mode: Mode) {
    let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
    let mut region = memfold.map(MIB).unwrap();
    paged_out(&mut region, 0x5a);
    REGION.store(region.base().as_ptr(), Ordering::SeqCst);
    READ.store(0, Ordering::Relaxed);
    set_handler(
        libc::SIGALRM,
        touching_handler as *const () as usize,
        libc::SA_RESTART,
    );
    set_timer(Duration::from_micros(300));
    while READ.load(Ordering::Relaxed) < 300 {
        region.page_out(..).unwrap();
        assert!(region.chunks_exact(PAGE).all(|page| page[0] == 0x5a));
    }
    set_timer(Duration::ZERO);
    REGION.store(std::ptr::null_mut(), Ordering::SeqCst);
    while INSIDE.load(Ordering::SeqCst) > 0 {
        std::thread::yield_now();
    }
}

/// Faults while the limit is exceeded, when the handler itself compresses, on the smallest
/// alternate stack there is.
fn a_small_alternate_stack_is_enough(mode: Mode) {
    let memfold = builder(mode)
        .resident_limit(2 * MIB as u64)
        .build()
        .unwrap();
    let mut region = memfold.map(6 * MIB).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: asks for a number.
            let least = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) } as usize;
            let mut stack = vec![0_u8; least.max(2048) + 4096];
            let alternate = libc::stack_t {
                ss_sp: stack.as_mut_ptr().cast(),
                ss_flags: 0,
                ss_size: stack.len(),
            };
            // SAFETY: the stack lives until it is given up below.
            let set = unsafe { libc::sigaltstack(&raw const alternate, std::ptr::null_mut()) };
            assert_eq!(set, 0);
            for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
                fill_page(page, number as u64, 1);
            }
            for (number, page) in region.chunks_exact(PAGE).enumerate() {
                verify_page(page, number as u64, 1);
            }
            let none = libc::stack_t {
                ss_flags: libc::SS_DISABLE,
                ..alternate
            };
            // SAFETY: gives the stack up.
            unsafe { libc::sigaltstack(&raw const none, std::ptr::null_mut()) };
        });
    });
}

fn regions_are_not_inherited(mode: Mode) {
    let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
    let mut region = memfold.map(MIB).unwrap();
    paged_out(&mut region, 9);
    let start = region.base().as_ptr();
    let status = forked(|| {
        // SAFETY: none; the test is that this ends the child, and does not read anything.
        i32::from(unsafe { start.read_volatile() })
    });
    assert!(libc::WIFSIGNALED(status), "{status:#x}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
    let status = forked(|| {
        let refused = matches!(memfold.map(PAGE), Err(memfold::Error::Forked));
        // Dropping what the child inherited does not touch it, nor wait for the parent's threads.
        drop((region, memfold));
        if refused { 17 } else { 0 }
    });
    assert_eq!(libc::WEXITSTATUS(status), 17, "{status:#x}");
}

/// A child may have a `Memfold` of its own, while its parent has one.
fn a_child_makes_its_own(mode: Mode) {
    let memfold = builder(mode).limit(64 * MIB as u64).build().unwrap();
    let mut region = memfold.map(MIB).unwrap();
    paged_out(&mut region, 0x5a);
    let status = forked(|| {
        let (_own, mut region) = own_region(mode);
        paged_out(&mut region, 0xa5);
        let whole =
            |(index, byte): (usize, &u8)| *byte == if index % PAGE == PAGE / 2 { 1 } else { 0xa5 };
        if region.iter().enumerate().all(whole) {
            0
        } else {
            4
        }
    });
    assert_eq!(status, 0, "{mode:?}: {status:#x}");
    assert_eq!((region[0], region[PAGE / 2]), (0x5a, 1));
}

static TICKS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn ticking_handler(_: i32) {
    TICKS.fetch_add(1, Ordering::Relaxed);
}

/// A call on a large region is not over before the program's timer, whose signal this thread alone takes.
fn signals_arrive_during_long_calls(mode: Mode) {
    let status = forked(|| {
        let builder = builder(mode).limit(256 * MIB as u64);
        let Ok(own) = builder.readahead(false).build() else {
            return 64;
        };
        let Ok(mut region) = own.map(32 * MIB) else {
            return 65;
        };
        for (number, page) in region.chunks_exact_mut(PAGE).enumerate() {
            fill_page(page, number as u64, 1);
        }
        set_handler(
            libc::SIGALRM,
            ticking_handler as *const () as usize,
            libc::SA_RESTART,
        );
        set_timer(Duration::from_millis(1));
        let ticks = |call: &dyn Fn()| {
            let before = TICKS.load(Ordering::Relaxed);
            call();
            TICKS.load(Ordering::Relaxed) - before
        };
        let page_out = || assert!(region.page_out(..).unwrap() > 0);
        let calls: [(i32, &dyn Fn()); 4] = [
            (1, &page_out),
            (2, &|| region.prefetch(..).unwrap()),
            (0, &page_out),
            (4, &|| drop(region.pin(..).unwrap())),
        ];
        let mut late = 0;
        for (bit, call) in calls {
            // One comes at the end, however long it has waited.
            if ticks(call) < 3 {
                late |= bit;
            }
        }
        late
    });
    assert_eq!(status, 0, "{mode:?}: {status:#x}");
}

/// As the child of a supervisor does, which wants none of its parent's handlers.
fn a_child_that_resets_signals_makes_its_own(mode: Mode) {
    let _parents = builder(mode).limit(64 * MIB as u64).build().unwrap();
    let status = forked(|| {
        for signal in 1..32 {
            // SAFETY: numbers only. It is refused for some.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        let (_own, mut region) = own_region(mode);
        paged_out(&mut region, 0xa5);
        i32::from(region[0] != 0xa5)
    });
    assert_eq!(status, 0, "{mode:?}: {status:#x}");
}

/// What it would give are addresses in the parent.
fn an_inherited_allocator_gives_nothing() {
    let memfold = builder(Mode::Signal)
        .limit(64 * MIB as u64)
        .build()
        .unwrap();
    let allocator = memfold.allocator();
    let layout = Layout::new::<u64>();
    assert!(allocator.allocate(layout).is_ok());
    let status = forked(|| i32::from(allocator.allocate(layout).is_ok()));
    assert_eq!(status, 0, "{status:#x}");
}

/// Programs close what they do not know. Their memory must not read as zeros then.
fn closed_descriptors_cost_no_byte(mode: Mode) {
    let status = forked(|| {
        let (_own, mut region) = own_region(mode);
        paged_out(&mut region, 0xa5);
        // SAFETY: numbers only; what is closed is the test harness's, and memfold's. The child ends
        // before anything is closed once more.
        unsafe {
            libc::close_range(3, u32::MAX, 0);
            libc::alarm(10);
            let lost = region.iter().any(|byte| !matches!(byte, 0xa5 | 1));
            libc::_exit(i32::from(lost))
        }
    });
    let ended = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT;
    let may_end = mode != Mode::Protection;
    assert!(status == 0 || may_end && ended, "{mode:?}: {status:#x}");
}

/// Waits until the listener is in a read from its userfaultfd: it needs the number no more. Between a fault and that
/// read, it wakes the thread that faulted.
fn is_read_from() -> bool {
    let read = libc::SYS_read.to_string();
    let is_uffd = |number: &str| {
        let number = i32::from_str_radix(number.trim_start_matches("0x"), 16);
        number.is_ok_and(|number| {
            std::fs::read_link(format!("/proc/self/fd/{number}"))
                .is_ok_and(|name| name.to_string_lossy().contains("userfaultfd"))
        })
    };
    let reads = |thread: &Path| {
        let text = |name| std::fs::read_to_string(thread.join(name)).unwrap_or_default();
        let call = text("syscall");
        let mut words = call.split_whitespace();
        text("comm").trim_end() == "memfold-fault"
            && words.next() == Some(&read)
            && words.next().is_some_and(is_uffd)
    };
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(30) {
        let mut threads = std::fs::read_dir("/proc/self/task").unwrap();
        if threads.any(|thread| reads(&thread.unwrap().path())) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// The numbers of closed descriptors are the program's next files: these are not touched, and not closed.
fn reused_descriptors_are_left_alone(mode: Mode) {
    let bytes = vec![0xff; MIB];
    let status = forked(|| {
        let (own, mut region) = own_region(mode);
        paged_out(&mut region, 0xa5);
        // In memory, until it is paged out below.
        let lost = region.iter().any(|byte| !matches!(byte, 0xa5 | 1));
        // A listener has served all faults before this one, those too that readahead has made needless.
        let Ok(mut last) = own.map(PAGE) else {
            return 16;
        };
        last[0] = 1;
        if mode == Mode::Thread && !is_read_from() {
            return 32;
        }
        // SAFETY: numbers only; what is closed is the test harness's, and memfold's.
        unsafe {
            libc::close_range(3, u32::MAX, 0);
            libc::signal(libc::SIGALRM, libc::SIG_DFL);
            libc::alarm(10);
        }
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        let numbers = file.as_raw_fd()..64;
        for number in numbers.clone() {
            // SAFETY: numbers only; all but the file's own are closed.
            unsafe { libc::dup2(file.as_raw_fd(), number) };
        }
        region.page_out(..).unwrap();
        // Without a userfaultfd nothing else is lost.
        let kept = mode != Mode::Protection || region.iter().all(|byte| matches!(byte, 0xa5 | 1));
        region.discard(..).unwrap();
        region.page_out(..).unwrap();
        drop((last, region, own));
        // SAFETY: numbers only.
        let is_open = |number| unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
        let closed = !numbers.into_iter().all(is_open);
        let mut found = vec![0; MIB];
        file.read_exact_at(&mut found, 0).unwrap();
        i32::from(lost)
            | i32::from(!kept) << 1
            | i32::from(closed) << 2
            | i32::from(found != bytes) << 3
    });
    assert_eq!(status, 0, "{mode:?}: {status:#x}");
}

/// As a jump into any memory that is not code does.
fn a_jump_into_a_region_ends_the_program(mode: Mode) {
    let status = forked(|| {
        let (_own, mut region) = own_region(mode);
        // A return, were it code.
        region[0] = 0xc3;
        // SAFETY: none; the test is that this ends the child, by the alarm at the latest.
        unsafe {
            libc::signal(libc::SIGALRM, libc::SIG_DFL);
            libc::alarm(10);
            std::mem::transmute::<*mut u8, extern "C" fn()>(region.base().as_ptr())();
        }
        4
    });
    assert!(libc::WIFSIGNALED(status), "{mode:?}: {status:#x}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV, "{mode:?}");
}

/// As where the host cannot read what it has swapped out of a region itself. Here it is write
/// protection that raises the same signal.
fn a_page_that_cannot_be_accessed_ends_the_program() {
    #[repr(C)]
    struct Register {
        range: [u64; 2],
        mode: u64,
        ioctls: u64,
    }
    const UFFDIO_REGISTER: u64 = 0xc020_aa00;
    const UFFDIO_WRITEPROTECT: u64 = 0xc018_aa06;
    const MISSING_AND_WRITES: u64 = 1 | 2;
    let status = forked(|| {
        let (_own, mut region) = own_region(Mode::Signal);
        region[0] = 1;
        let range = [region.base().as_ptr() as u64, MIB as u64];
        let mut register = Register {
            range,
            mode: MISSING_AND_WRITES,
            ioctls: 0,
        };
        let mut protect = [range[0], range[1], 1_u64];
        let is_uffd = |fd: &i32| {
            std::fs::read_link(format!("/proc/self/fd/{fd}"))
                .is_ok_and(|name| name.to_string_lossy().contains("userfaultfd"))
        };
        // SAFETY: structures as the kernel has them; the range is the region.
        let protected = (3..1000).filter(is_uffd).any(|fd| unsafe {
            libc::ioctl(fd, UFFDIO_REGISTER, &raw mut register) == 0
                && libc::ioctl(fd, UFFDIO_WRITEPROTECT, &raw mut protect) == 0
        });
        if !protected {
            // Every kernel that memfold runs on has write protection for userfaultfd.
            return 5;
        }
        // SAFETY: numbers only.
        unsafe {
            libc::signal(libc::SIGALRM, libc::SIG_DFL);
            libc::alarm(30);
        }
        region[0] = 2;
        4
    });
    assert!(libc::WIFSIGNALED(status), "{status:#x}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGABRT);
}

#[test]
fn faults_live_beside_the_programs_signals() {
    let action = own_handler as *const () as usize;
    set_handler(libc::SIGBUS, action, libc::SA_SIGINFO);
    for mode in common::modes() {
        signals_of_the_program_get_through(mode);
        handlers_may_touch_regions(mode);
        a_small_alternate_stack_is_enough(mode);
        regions_are_not_inherited(mode);
        a_child_makes_its_own(mode);
        a_child_that_resets_signals_makes_its_own(mode);
        signals_arrive_during_long_calls(mode);
        closed_descriptors_cost_no_byte(mode);
        reused_descriptors_are_left_alone(mode);
        a_jump_into_a_region_ends_the_program(mode);
    }
    an_inherited_allocator_gives_nothing();
    a_page_that_cannot_be_accessed_ends_the_program();
}
