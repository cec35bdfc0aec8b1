//! What goes wrong in the kernel, or is unusual there, beside what programs do.

use crate::page::{PageRange, VirtualPage};
use memfold_testing::Random;
use shuttle::current::{TaskId, me};
use shuttle::rand::Rng;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

/// Where memory is short, one in `REFUSED` requests fails.
const REFUSED: u32 = 24;

/// What may go wrong in one history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Adversity {
    /// The helper is stopped now and then, in the gate too, with all threads of its program.
    pub stops: bool,
    /// Requests to the kernel fail now and then for want of memory, or because a page is pinned.
    pub shortages: bool,
    /// Half of the reads of fork events fail, as where descriptors are short.
    pub unread_forks: bool,
    /// The helper is preempted before it carries a run off, until mappings change, and threads that are to fork until it has.
    pub late_helper: bool,
    /// Threads of memfold are preempted for long where they are about to fill pages.
    pub preemption: bool,
    /// Threads of programs are preempted for long between a change of their mappings and its event.
    pub late_events: bool,
    /// Half of the places are above 2^47 bytes (five-level page tables).
    pub high: bool,
    /// Victims are those that the clock hand meets, as where active pages leave first: in so little memory the other list
    /// has nearly all of them.
    pub by_hand: bool,
}

impl Adversity {
    /// What the history of a seed has: mostly nothing.
    pub fn choose(random: &mut Random) -> Adversity {
        let mut one_of = |many| random.below(many) == 0;
        Adversity {
            stops: one_of(5),
            shortages: one_of(6),
            unread_forks: false,
            late_helper: false,
            preemption: one_of(12),
            // Where two threads change mappings and one goes on, the order of their changes is a guess.
            late_events: false,
            high: one_of(8),
            by_hand: false,
        }
    }
}

thread_local! {
    static NOW: Cell<Adversity> = Cell::default();
    /// Children compared with changes beside their forks, in all executions on this thread, and those of which their
    /// mappings did not tell.
    static COMPARED: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
    static LOCKED: Cell<PageRange> = Cell::default();
    /// How often each page was filled, moved or paged out.
    static CHANGES: RefCell<HashMap<VirtualPage, u32>> = RefCell::default();
    /// The page of the fault that each thread read last.
    static FAULTS: RefCell<HashMap<TaskId, VirtualPage>> = RefCell::default();
}

/// Notes that pages were filled, moved or paged out.
pub fn note_change(range: PageRange) {
    CHANGES.with_borrow_mut(|changes| {
        for page in range.start.0..range.end.0 {
            *changes.entry(VirtualPage(page)).or_default() += 1;
        }
    });
}

/// How often a page was filled, moved or paged out.
pub fn changes(page: VirtualPage) -> u32 {
    CHANGES.with_borrow(|changes| changes.get(&page).copied().unwrap_or_default())
}

/// Notes that this thread read a fault.
pub fn note_fault(page: VirtualPage) {
    FAULTS.with_borrow_mut(|faults| faults.insert(me(), page));
}

/// The page of the fault that this thread read last.
pub fn last_fault() -> Option<VirtualPage> {
    FAULTS.with_borrow(|faults| faults.get(&me()).copied())
}

/// Counts a child that was compared with changes beside its fork, and whether its mappings told which of them it contains.
pub fn note_compared(is_clear: bool) {
    let (compared, unclear) = COMPARED.get();
    COMPARED.set((compared + 1, unclear + u64::from(!is_clear)));
}

/// Of how many children, in the executions on this thread, it was looked for what they contain, and of how many it did not
/// show.
pub fn compared() -> (u64, u64) {
    COMPARED.get()
}

/// Sets what goes wrong in the execution that this thread begins. The kernel moves no page out of `locked`.
pub fn begin(adversity: Adversity, locked: PageRange) {
    NOW.set(adversity);
    LOCKED.set(locked);
    CHANGES.with_borrow_mut(HashMap::clear);
    FAULTS.with_borrow_mut(HashMap::clear);
}

/// Whether the kernel refuses to move a page out, as if it were locked.
pub fn is_locked(page: VirtualPage) -> bool {
    LOCKED.get().contains(page)
}

/// Whether half of the places are above what four levels of page tables map.
pub fn is_high() -> bool {
    NOW.get().high
}

/// Whether victims are those that the clock hand meets.
pub fn is_by_hand() -> bool {
    NOW.get().by_hand
}

/// Whether this request fails.
pub fn is_refused() -> bool {
    NOW.get().shortages && shuttle::rand::thread_rng().gen_range(0..REFUSED) == 0
}

/// Whether a fork event cannot be read.
pub fn is_fork_unread() -> bool {
    is_refused() || NOW.get().unread_forks && shuttle::rand::thread_rng().gen_range(0..2) == 0
}

/// Whether the helper is preempted until mappings change.
pub fn is_helper_late() -> bool {
    NOW.get().late_helper
}

/// For how many looks a thread of memfold is preempted at most, and after how many changes of the page that
/// it is about to change it goes on: a page may be brought in, written and paged out again meanwhile.
pub fn preempt() -> (u32, u32) {
    const MOST_CHANGES: u32 = 4;
    match looks(NOW.get().preemption, 4, 400) {
        0 => (0, 0),
        looks => (
            looks,
            shuttle::rand::thread_rng().gen_range(1..=MOST_CHANGES),
        ),
    }
}

/// For how many looks a thread of a program is preempted before it tells of its change.
pub fn delay_event() -> u32 {
    looks(NOW.get().late_events, 2, 100)
}

/// For how many looks the helper stands still at this point.
pub fn stop() -> u32 {
    looks(NOW.get().stops, 8, 300)
}

/// Fewer than `longest` looks at one in `points` points where this may happen; else none.
fn looks(may_happen: bool, points: u32, longest: u32) -> u32 {
    let mut random = shuttle::rand::thread_rng();
    match may_happen && random.gen_range(0..points) == 0 {
        true => random.gen_range(1..longest),
        false => 0,
    }
}
