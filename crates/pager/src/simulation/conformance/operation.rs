//! What is done to both kernels: made from a seed, printed, and made shorter.

use crate::page::{PageRange, VirtualPage};
use memfold_testing::Random;
use std::fmt;

/// The first page that operations name. Nothing else is mapped around it.
const ARENA: VirtualPage = VirtualPage(0x10_0000);
/// Its pages.
const ARENA_PAGES: u64 = 32;
/// Pages from one place for mappings to the next.
const DISTANCE: u64 = 8;
/// The longest mapping; behind it lies a gap, unless another is moved there.
const LONGEST: u64 = 6;

/// Threads: the helper, two of the program, and one of each forked child.
pub const THREADS: usize = 5;
/// The helper, which only moves pages.
pub const HELPER: usize = 0;
/// The first thread of a forked child.
pub const FIRST_CHILD_THREAD: usize = 3;
/// The program and its children.
pub const PROCESSES: usize = 3;

/// The process that a thread is in.
pub fn process_of(thread: usize) -> usize {
    thread.saturating_sub(FIRST_CHILD_THREAD - 1)
}

/// The thread that a forked child begins with.
pub fn first_thread_of(child: usize) -> usize {
    child + FIRST_CHILD_THREAD - 1
}

/// All pages that operations name.
pub fn arena() -> PageRange {
    Pages(0, ARENA_PAGES).range()
}

/// Pages of the arena: the first one's number, and how many.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Pages(pub u64, pub u64);

impl Pages {
    /// As the kernel numbers them.
    pub fn range(self) -> PageRange {
        PageRange {
            start: page(self.0),
            end: page(self.0 + self.1),
        }
    }

    /// The range as numbers of the arena.
    pub fn of(range: PageRange) -> Pages {
        Pages(number(range.start), range.pages())
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}..{}", self.0, self.0 + self.1)
    }
}

/// A page of the arena.
pub fn page(number: u64) -> VirtualPage {
    ARENA.plus(number)
}

/// The number of a page in the arena.
pub fn number(page: VirtualPage) -> u64 {
    page.0 - ARENA.0
}

/// What a thread of a program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// mmap of free pages.
    Map(Pages),
    /// Reads a page.
    Read(u64),
    /// Writes a page: its number, the contents.
    Write(u64, u64),
    /// `MADV_POPULATE_WRITE` of a page.
    Populate(u64),
    /// `MADV_DONTNEED`.
    Drop(Pages),
    /// munmap.
    Unmap(Pages),
    /// mremap to a fixed place; the flag is `MREMAP_DONTUNMAP`.
    Remap(Pages, u64, bool),
    /// `MADV_DONTFORK`.
    Keep(Pages),
    /// `MADV_DOFORK`.
    Give(Pages),
    /// `MADV_RANDOM`.
    Mark(Pages),
    /// `MADV_FREE`, where the kernel has no need of pages.
    Free(Pages),
    /// fork, as this child.
    Fork(usize),
    /// The same of a program whose userfaultfd asks for no event of forks. A history has no others then.
    ForkUnreported(usize),
    /// The helper moves pages (`UFFDIO_MOVE`).
    Move(Pages, u64),
    /// Carries pages off onto mapped memory that is withheld from children, as the helper does onto the stage. No history
    /// of a seed has it.
    Carry(Pages, u64),
}

/// What memfold asks of the kernel about a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Registers for missing pages.
    Register(Pages),
    /// Registers for missing and write-protected pages.
    RegisterProtectable(Pages),
    /// Unregisters.
    Unregister(Pages),
    /// Copies pages in: which, and the contents of the first.
    CopyIn(Pages, u64),
    /// Copies one page in without waking.
    PutPage(u64, u64),
    /// Maps the zero page.
    Zero(u64),
    /// Wakes.
    Wake(Pages),
    /// Write-protects.
    Protect(Pages),
    /// Allows writes.
    Unprotect(Pages),
    /// Whether one registered mapping holds all of it.
    IsRegistered(Pages),
    /// Copies pages out.
    CopyOut(Pages),
    /// The mapping around a page.
    MappingAround(u64),
    /// Reads this many messages. In a history: the faults, and one event if it is not zero.
    Receive(usize),
}

/// One operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A thread does something, and goes on or waits.
    By(usize, Call),
    /// memfold does something to a process.
    To(usize, Request),
    /// A process is killed.
    Exit(usize),
}

impl fmt::Debug for Operation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::By(HELPER, call) => write!(out, "helper: {call:?}"),
            Operation::By(thread, call) => write!(out, "thread {thread}: {call:?}"),
            Operation::To(process, request) => {
                write!(out, "memfold, process {process}: {request:?}")
            }
            Operation::Exit(process) => write!(out, "process {process} is killed"),
        }
    }
}

/// How many operations a history has. Of these, what is not possible when its turn comes is left out.
const LENGTH: usize = 70;

/// The history of a seed.
pub fn history(seed: u64) -> Vec<Operation> {
    let mut random = Random::new(seed);
    let mut operations = vec![
        Operation::By(1, Call::Map(Pages(0, LONGEST))),
        Operation::By(1, Call::Write(1, 0x1001)),
        Operation::By(1, Call::Write(3, 0x1003)),
    ];
    if random.below(4) != 0 {
        // Most is about what is registered.
        let second = Pages(DISTANCE, 1 + random.below(LONGEST as usize) as u64);
        operations.push(Operation::By(2, Call::Map(second)));
        let request = match random.below(4) {
            0 => Request::Register(Pages(0, 2 * DISTANCE)),
            _ => Request::RegisterProtectable(Pages(0, 2 * DISTANCE)),
        };
        operations.push(Operation::To(0, request));
    }
    let weights = Weights::choose(&mut random);
    let made = (1..=LENGTH as u64).map(|tag| weights.operation(&mut random, tag << 16));
    operations.extend(made);
    operations
}

/// Whether the userfaultfd of a history's program asks for events of forks.
pub(crate) fn reports_forks(history: &[Operation]) -> bool {
    let is_unreported =
        |operation: &Operation| matches!(operation, Operation::By(_, Call::ForkUnreported(_)));
    !history.iter().any(is_unreported)
}

const CALLS: usize = 14;
const REQUESTS: usize = 13;
/// How often each call comes, in the order of `Weights::call`: what unmaps is rare, or little is left.
const BASE_CALLS: [usize; CALLS] = [4, 6, 6, 2, 3, 2, 2, 2, 3, 1, 1, 1, 2, 6];
/// The same for requests: what unregisters is rare.
const BASE_REQUESTS: [usize; REQUESTS] = [2, 1, 1, 5, 4, 4, 3, 4, 4, 2, 2, 1, 12];

struct Weights {
    calls: [usize; CALLS],
    requests: [usize; REQUESTS],
    threads: usize,
    exits: bool,
    reports_forks: bool,
}

/// One index, as often as its weight says.
fn pick(random: &mut Random, weights: &[usize]) -> usize {
    let mut number = random.below(weights.iter().sum::<usize>().max(1));
    for (index, weight) in weights.iter().enumerate() {
        if number < *weight {
            return index;
        }
        number -= weight;
    }
    0
}

impl Weights {
    fn choose(random: &mut Random) -> Weights {
        // Few kinds in each history, so that these meet often.
        let mut vary = |base: usize| base * [0, 1, 1, 4][random.below(4)];
        let mut calls = BASE_CALLS.map(&mut vary);
        let mut requests = BASE_REQUESTS.map(&mut vary);
        // What maps, accesses, registers and reads, in each.
        calls[0] = calls[0].max(1);
        calls[1] = calls[1].max(1);
        requests[0] = requests[0].max(1);
        requests[REQUESTS - 1] = BASE_REQUESTS[REQUESTS - 1];
        Weights {
            calls,
            requests,
            threads: 2 + random.below(THREADS - 1),
            exits: random.below(4) == 0,
            reports_forks: random.below(3) != 0,
        }
    }

    fn operation(&self, random: &mut Random, tag: u64) -> Operation {
        if self.exits && random.below(40) == 0 {
            return Operation::Exit(random.below(PROCESSES));
        }
        if random.below(2) == 0 {
            let call = self.call(random, tag);
            let thread = match call {
                Call::Move(..) => HELPER,
                _ => 1 + random.below((self.threads).min(THREADS - 1)),
            };
            return Operation::By(thread, call);
        }
        // Most are about the program, which is there in any case.
        let process = random.below(2 * PROCESSES).saturating_sub(PROCESSES);
        Operation::To(process, self.request(random, tag))
    }

    fn call(&self, random: &mut Random, tag: u64) -> Call {
        let one = |random: &mut Random| random.below(ARENA_PAGES as usize) as u64;
        match pick(random, &self.calls) {
            0 => {
                let place = random.below((ARENA_PAGES / DISTANCE) as usize) as u64;
                Call::Map(Pages(
                    place * DISTANCE,
                    1 + random.below(LONGEST as usize) as u64,
                ))
            }
            1 => Call::Write(near(random), tag),
            2 => Call::Read(near(random)),
            3 => Call::Populate(near(random)),
            4 => Call::Drop(pages(random)),
            5 => Call::Unmap(pages(random)),
            6 => Call::Remap(pages_within(random), one(random) / 2 * 2, false),
            7 => Call::Remap(pages_within(random), one(random) / 2 * 2, true),
            8 if self.reports_forks => Call::Fork(0),
            8 => Call::ForkUnreported(0),
            9 => Call::Keep(pages(random)),
            10 => Call::Give(pages(random)),
            11 => Call::Mark(pages(random)),
            12 => Call::Free(pages(random)),
            _ => Call::Move(pages_within(random), near(random)),
        }
    }

    fn request(&self, random: &mut Random, tag: u64) -> Request {
        match pick(random, &self.requests) {
            0 => Request::RegisterProtectable(pages(random)),
            1 => Request::Register(pages(random)),
            2 => Request::Unregister(pages(random)),
            3 => Request::CopyIn(pages_within(random), tag),
            4 => Request::PutPage(near(random), tag),
            5 => Request::Zero(near(random)),
            6 => Request::Wake(pages(random)),
            7 => Request::Protect(pages(random)),
            8 => Request::Unprotect(pages(random)),
            9 => Request::IsRegistered(pages_within(random)),
            10 => Request::CopyOut(pages_within(random)),
            11 => Request::MappingAround(near(random)),
            _ => Request::Receive(random.below(4)),
        }
    }
}

/// A page that is often mapped, and often the same one.
fn near(random: &mut Random) -> u64 {
    match random.below(4) {
        0 | 1 => random.below(4) as u64,
        2 => random.below(LONGEST as usize) as u64,
        _ => {
            let place = random.below((ARENA_PAGES / DISTANCE) as usize) as u64;
            place * DISTANCE + random.below(LONGEST as usize) as u64
        }
    }
}

/// A few pages of one place.
fn pages_within(random: &mut Random) -> Pages {
    let start = near(random);
    let longest = LONGEST - start % DISTANCE;
    Pages(start, 1 + random.below(longest as usize) as u64)
}

/// The pages of a place, all or a few; or pages of several.
fn pages(random: &mut Random) -> Pages {
    match random.below(4) {
        0 => {
            let start = near(random);
            let longest = (ARENA_PAGES - start).min(2 * DISTANCE);
            Pages(start, 1 + random.below(longest as usize) as u64)
        }
        1 => Pages(near(random) / DISTANCE * DISTANCE, LONGEST),
        _ => pages_within(random),
    }
}
