//! What programs do: made from a seed, printed, and made shorter.

use crate::page::{PageRange, VirtualPage};
use crate::simulation::adversity::Adversity;
use memfold_testing::Random;
use std::fmt;

/// Pages of the largest area.
pub const AREA_PAGES: u64 = 6;
/// Areas that one thread has at most.
pub const AREAS: usize = 3;
/// Places for areas in an address space. Few, so that addresses are used again soon.
pub const PLACES: usize = 12;

/// The first place for areas, behind the stages of all processes.
const FIRST: u64 = 0x1_0000;
/// Distance of two places. There is no gap between full areas.
const DISTANCE: u64 = AREA_PAGES;

/// Pages that four levels of page tables map.
const FOUR_LEVELS: u64 = 1 << 36;

/// All places for areas. With `high`, each second one differs from the one before it in a bit that four
/// levels of page tables do not have.
pub fn places(high: bool) -> impl Iterator<Item = VirtualPage> {
    (0..PLACES as u64).map(move |place| {
        let (above, place) = match high {
            true => (place % 2 * FOUR_LEVELS, place & !1),
            false => (0, place),
        };
        VirtualPage(above + FIRST + place * DISTANCE)
    })
}

/// One step of a thread. Areas are numbers of the thread's own; a step on an area that is not mapped does
/// nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// mmap of an area of this many pages.
    Map(usize, u64),
    /// Writes one page.
    Write(usize, u64),
    /// Reads one page.
    Read(usize, u64),
    /// Writes a page of any thread: of all pages that are mapped, the one of this number.
    Poke(u64),
    /// Reads a page of any thread.
    Peek(u64),
    /// Lets others run, until this page of all is paged out or long enough.
    AwaitPageOut(u64),
    /// Lets others run so often.
    Pause(u64),
    /// Lets others run, until memfold manages an area or long enough.
    Rest(usize),
    /// Writes all pages.
    Fill(usize),
    /// Reads all pages.
    Check(usize),
    /// `madvise(MADV_DONTNEED)` from one page on.
    Drop(usize, u64),
    /// `madvise(MADV_FREE)`, of which the kernel frees nothing. No history of a seed has it.
    Free(usize),
    /// munmap.
    Unmap(usize),
    /// mmap over an area (`MAP_FIXED`). No history of a seed has it.
    MapOver(usize),
    /// mremap to a free place; the flag is `MREMAP_DONTUNMAP`.
    Move(usize, bool),
    /// mremap to a free place, and back at once.
    Away(usize),
    /// mremap over another area of the thread.
    MoveOver(usize, usize),
    /// fork; the child does these steps.
    Fork(Vec<Step>),
    /// In a forked child: starts a helper.
    Connect,
    /// The kernel takes a reference of a page without pinning it, the pages of another area are written, and
    /// then the kernel writes. No history of a seed has it: docs/limits.md.
    LateWrite(usize, usize),
    /// All threads of the program end at once, wherever they are (SIGKILL).
    Kill,
}

/// What the threads of one program do, and how much of it may be resident.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// Steps of each thread.
    pub threads: Vec<Vec<Step>>,
    /// Threads take the same places for their areas. Else each has its own.
    pub share_places: bool,
    /// The resident limit, in pages.
    pub limit: u64,
    /// Places of the stage.
    pub stage: u64,
    /// Threads that serve faults.
    pub handlers: u32,
    /// What goes wrong in the kernel.
    pub adversity: Adversity,
    /// Forks are prepared: the kernel reports none.
    pub prepared: bool,
    /// The kernel moves no pages: helpers carry them off. No history of a seed does.
    pub carries: bool,
    /// The kernel tells which pages were accessed.
    pub tracked: bool,
    /// The place out of which the kernel moves no page, as if it were locked.
    pub locked: Option<usize>,
    /// What the kernel forgets to tell is chosen by this.
    pub seed: u64,
}

impl History {
    /// That of a scenario, which has a program of its own: nothing goes wrong beside it.
    pub(crate) fn of_scenario(seed: u64, limit: u64) -> History {
        History {
            threads: Vec::new(),
            share_places: false,
            limit,
            stage: 4,
            handlers: 2,
            adversity: Adversity::default(),
            prepared: false,
            carries: false,
            tracked: false,
            locked: None,
            seed,
        }
    }

    /// The history of a seed.
    pub fn of_seed(seed: u64) -> History {
        let mut random = Random::new(seed);
        if seed.is_multiple_of(STRANGERS) {
            return History::with_strangers(seed, &mut random);
        }
        if seed % UNREAD_MOVES == 12 {
            return History::with_unread_moves(seed, &mut random);
        }
        if seed % MOVES_BESIDE_FORKS == 7 {
            return History::with_moves_beside_forks(seed, &mut random);
        }
        if seed % FORKS_OF_CHILDREN == 9 {
            return History::with_forks_of_children(seed, &mut random);
        }
        let share_places = random.below(2) == 0;
        let weights = Weights::choose(&mut random, share_places);
        let threads = 1 + random.below(3);
        let length = 4 + random.below(12);
        let rests = random.below(4) != 0;
        let threads = (0..threads).map(|_| {
            let mut steps = vec![Step::Map(0, AREA_PAGES), Step::Fill(0)];
            if rests {
                steps.extend([Step::Map(1, 2), Step::Fill(1), Step::Rest(0)]);
            }
            steps.extend((0..length).map(|_| weights.step(&mut random)));
            if random.below(KILLED) == 0 {
                steps.push(Step::Kill);
            }
            if share_places {
                keep_one_move(&mut steps);
            }
            steps
        });
        let threads: Vec<_> = threads.collect();
        let forks = weights.has_forks();
        History {
            threads,
            share_places,
            limit: if forks { 16 } else { 6 } + random.below(8) as u64,
            stage: 4 + random.below(8) as u64,
            handlers: 1 + random.below(2) as u32,
            adversity: Adversity {
                by_hand: seed % 2 == 1,
                ..Adversity::choose(&mut random)
            },
            locked: (random.below(4) == 0).then(|| random.below(PLACES)),
            prepared: forks && random.below(PREPARED) == 0,
            carries: false,
            tracked: false,
            seed,
        }
    }

    /// One thread changes and moves a page that others read, and two handlers serve both: two faults on one
    /// page are served at once.
    fn with_strangers(seed: u64, random: &mut Random) -> History {
        const ROUNDS: usize = 3;
        let mut owner = vec![Step::Map(0, 1 + random.below(2) as u64), Step::Fill(0)];
        for area in 1..AREAS {
            owner.extend([Step::Map(area, AREA_PAGES), Step::Fill(area)]);
        }
        owner.push(Step::Rest(0));
        for _ in 0..ROUNDS {
            owner.extend((1..AREAS).map(Step::Fill));
            // Faults are served at once, not by the reclaimer, where there is room.
            owner.extend([
                Step::AwaitPageOut(0),
                Step::Unmap(1),
                Step::Pause(random.below(20) as u64),
            ]);
            owner.push(match random.below(4) {
                0 => Step::Move(0, false),
                1 => Step::Drop(0, 0),
                _ => Step::Away(0),
            });
            owner.extend([
                Step::Write(0, 0),
                Step::Map(1, AREA_PAGES),
                Step::Fill(1),
                Step::Fill(2),
                Step::Check(0),
            ]);
        }
        let strangers: Vec<Vec<Step>> = (0..2)
            .map(|_| {
                let looks = (0..8 * ROUNDS).flat_map(|_| {
                    [
                        Step::AwaitPageOut(0),
                        Step::Pause(random.below(8) as u64),
                        Step::Peek(0),
                    ]
                });
                [Step::Rest(0)].into_iter().chain(looks).collect()
            })
            .collect();
        History {
            threads: [owner].into_iter().chain(strangers).collect(),
            share_places: false,
            limit: 4 + random.below(4) as u64,
            stage: 2 + random.below(3) as u64,
            handlers: 2,
            locked: None,
            prepared: false,
            carries: false,
            tracked: false,
            adversity: Adversity {
                preemption: true,
                ..Adversity::default()
            },
            seed,
        }
    }

    /// One thread moves memory that is paged out, another forks and kills the program: the event of the move may
    /// never be raised, and yet the child has the memory where it was moved.
    fn with_unread_moves(seed: u64, random: &mut Random) -> History {
        let mut mover = Vec::new();
        for (area, pages) in [1 + random.below(4) as u64, AREA_PAGES, AREA_PAGES]
            .into_iter()
            .enumerate()
        {
            mover.extend([Step::Map(area, pages), Step::Fill(area)]);
        }
        mover.extend([
            Step::Rest(0),
            Step::AwaitPageOut(0),
            Step::Pause(random.below(20) as u64),
            Step::Move(0, false),
        ]);
        let forker = vec![
            Step::Rest(0),
            Step::AwaitPageOut(0),
            Step::Pause(random.below(30) as u64),
            Step::Fork(vec![]),
            Step::Kill,
        ];
        History {
            threads: vec![mover, forker],
            share_places: false,
            limit: 5 + random.below(6) as u64,
            stage: 2 + random.below(4) as u64,
            handlers: 1 + random.below(2) as u32,
            locked: None,
            prepared: random.below(PREPARED) == 0,
            carries: false,
            tracked: false,
            adversity: Adversity {
                late_events: true,
                ..Adversity::default()
            },
            seed,
        }
    }

    /// One thread moves memory away and maps other memory where it was, another forks, and its forks are prepared: what
    /// was listed for a child may be elsewhere when it is given.
    fn with_moves_beside_forks(seed: u64, random: &mut Random) -> History {
        const ROUNDS: usize = 3;
        let mut mover = vec![Step::Map(0, AREA_PAGES), Step::Fill(0)];
        for _ in 0..ROUNDS {
            mover.push(match random.below(2) {
                0 => Step::Rest(0),
                _ => Step::Pause(random.below(40) as u64),
            });
            mover.extend([
                Step::Move(0, false),
                Step::Map(1, AREA_PAGES),
                Step::Fill(1),
                Step::Pause(random.below(40) as u64),
            ]);
            if random.below(2) == 0 {
                mover.push(Step::Unmap(1));
            }
        }
        let mut forker = vec![Step::Map(0, 2), Step::Fill(0), Step::Rest(0)];
        for _ in 0..ROUNDS {
            forker.extend([Step::Fork(vec![]), Step::Pause(random.below(30) as u64)]);
        }
        History {
            threads: vec![mover, forker],
            share_places: false,
            limit: 10 + random.below(8) as u64,
            stage: 3 + random.below(4) as u64,
            handlers: 1 + random.below(2) as u32,
            locked: None,
            prepared: true,
            carries: false,
            tracked: false,
            adversity: Adversity::default(),
            seed,
        }
    }

    /// One thread forks children that fork again, each with a helper or without.
    fn with_forks_of_children(seed: u64, random: &mut Random) -> History {
        let mut weights = [1; KINDS];
        // Rows of docs/limits.md: what a child sees of these beside its fork.
        for kind in [DROP, MOVE_AND_STAY, FORK] {
            weights[kind] = 0;
        }
        let weights = Weights(weights);
        let mut steps = vec![Step::Map(0, AREA_PAGES), Step::Fill(0)];
        steps.extend([Step::Map(1, AREA_PAGES), Step::Fill(1), Step::Rest(0)]);
        for _ in 0..1 + random.below(2) {
            let mut child = weights.steps_of_child(random);
            let is_killed = child.last() == Some(&Step::Kill);
            let behind = child.len() + usize::from(!is_killed);
            let grandchild = weights.steps_of_child(random);
            child.insert(random.below(behind), Step::Fork(grandchild));
            steps.push(Step::Fork(child));
            steps.extend((0..random.below(4)).map(|_| weights.step(random)));
        }
        History {
            threads: vec![steps],
            share_places: false,
            limit: 10 + random.below(14) as u64,
            stage: 4 + random.below(8) as u64,
            handlers: 1 + random.below(2) as u32,
            adversity: Adversity {
                by_hand: seed % 2 == 1,
                ..Adversity::choose(random)
            },
            locked: None,
            prepared: random.below(PREPARED) == 0,
            carries: false,
            tracked: false,
            seed,
        }
    }

    /// The place out of which no page moves; empty if there is none.
    pub fn locked_range(&self) -> PageRange {
        let start = self
            .locked
            .and_then(|place| places(self.adversity.high).nth(place));
        let pages = if start.is_some() { AREA_PAGES } else { 0 };
        let start = start.unwrap_or_default();
        PageRange {
            start,
            end: start.plus(pages),
        }
    }

    /// Whether the core may meet errors. Where one thread drops what another touches, a page may be missing
    /// that was known to be there; a killed program's memory cannot be read; requests fail.
    pub fn may_err(&self) -> bool {
        self.adversity.shortages || self.threads.iter().flatten().any(may_err)
    }

    /// All steps, those of children included.
    pub fn steps(&self) -> usize {
        self.threads.iter().map(|steps| count(steps)).sum()
    }

    /// Histories that are a little shorter, the shortest first.
    pub fn shorter(&self) -> Vec<History> {
        let mut shorter = Vec::new();
        let mut with = |change: &dyn Fn(&mut History)| {
            let mut history = self.clone();
            change(&mut history);
            if history != *self {
                shorter.push(history);
            }
        };
        if self.threads.len() > 1 {
            for thread in 0..self.threads.len() {
                with(&|history| drop(history.threads.remove(thread)));
            }
        }
        with(&|history| history.handlers = 1);
        with(&|history| history.adversity = Adversity::default());
        with(&|history| history.locked = None);
        with(&|history| history.prepared = false);
        for thread in 0..self.threads.len() {
            let length = self.threads[thread].len();
            for part in [length / 2, length / 4, 1] {
                if part == 0 {
                    continue;
                }
                for start in (0..length).step_by(part) {
                    with(&|history| {
                        let end = (start + part).min(length);
                        history.threads[thread].drain(start..end);
                    });
                }
            }
            for index in 0..length {
                if let Step::Fork(child) = &self.threads[thread][index] {
                    for left_out in 0..child.len() {
                        with(&|history| {
                            if let Step::Fork(child) = &mut history.threads[thread][index] {
                                child.remove(left_out);
                            }
                        });
                        // Of its own child, all that it does.
                        with(&|history| {
                            if let Step::Fork(child) = &mut history.threads[thread][index]
                                && let Step::Fork(of_child) = &mut child[left_out]
                            {
                                of_child.clear();
                            }
                        });
                    }
                }
            }
        }
        shorter
    }
}

/// A row of docs/limits.md: what moves in where another thread's memory has left, and on again before the
/// event of the departure is read.
fn keep_one_move(steps: &mut Vec<Step>) {
    let mut moves = 0;
    steps.retain(|step| {
        moves += usize::from(matches!(step, Step::Move(..)));
        !matches!(step, Step::Move(..)) || moves == 1
    });
}

/// Whether a step may lead to errors, or one of the children that it forks.
fn may_err(step: &Step) -> bool {
    match step {
        Step::Poke(_) | Step::Peek(_) | Step::Kill => true,
        Step::Fork(child) => child.iter().any(may_err),
        _ => false,
    }
}

fn count(steps: &[Step]) -> usize {
    let own = |step: &Step| match step {
        Step::Fork(child) => 1 + count(child),
        _ => 1,
    };
    steps.iter().map(own).sum()
}

/// One in `STRANGERS` histories has threads that read what another moves.
const STRANGERS: u64 = 16;
/// One in `UNREAD_MOVES` histories has a move whose event is never raised.
const UNREAD_MOVES: u64 = 31;
/// One in `MOVES_BESIDE_FORKS` histories has moves beside prepared forks.
const MOVES_BESIDE_FORKS: u64 = 37;
/// One in `FORKS_OF_CHILDREN` histories has forked children that fork.
const FORKS_OF_CHILDREN: u64 = 41;
/// One in `KILLED` threads and children kills its program at its end.
const KILLED: usize = 12;

/// In one in `PREPARED` histories with forks these are prepared.
const PREPARED: usize = 3;

/// How often each kind of step comes in one history: many histories lack some kinds, so that others
/// meet more often.
struct Weights([usize; KINDS]);

const KINDS: usize = 15;
/// Some kinds.
const DROP: usize = 5;
const UNMAP: usize = 6;
const MOVE_OVER: usize = 9;
const MOVE_AND_STAY: usize = 8;
const POKE: usize = 10;
const PEEK: usize = 11;
const FORK: usize = 13;
const AWAY: usize = 14;

impl Weights {
    fn choose(random: &mut Random, share_places: bool) -> Weights {
        let mut weights = [0; KINDS];
        for weight in &mut weights {
            *weight = [0, 1, 1, 4][random.below(4)];
        }
        // Forks take long, and make histories with others in them long.
        weights[FORK] = [0, 0, 0, 1, 2][random.below(5)];
        if random.below(2) == 0 {
            weights[POKE] = 0;
            weights[PEEK] = 0;
        }
        if share_places {
            // Rows of docs/limits.md: what one thread unmaps or drops where the memory of another has just moved
            // in or away.
            for kind in [DROP, UNMAP, MOVE_AND_STAY, MOVE_OVER, AWAY] {
                weights[kind] = 0;
            }
        }
        if weights[FORK] > 0 {
            // Rows of docs/limits.md: what a child sees of these beside its fork.
            weights[DROP] = 0;
            weights[MOVE_AND_STAY] = 0;
        }
        // Something is to do in each.
        weights[0] = weights[0].max(1);
        Weights(weights)
    }

    fn has_forks(&self) -> bool {
        self.0[FORK] > 0
    }

    fn step(&self, random: &mut Random) -> Step {
        let mut number = random.below(self.0.iter().sum());
        let mut kind = 0;
        while number >= self.0[kind] {
            number -= self.0[kind];
            kind += 1;
        }
        let area = random.below(AREAS);
        let page = random.below(AREA_PAGES as usize) as u64;
        match kind {
            0 => Step::Write(area, page),
            1 => Step::Map(area, 1 + page),
            2 => Step::Read(area, page),
            3 => Step::Fill(area),
            4 => Step::Check(area),
            5 => Step::Drop(area, page / 2),
            6 => Step::Unmap(area),
            7 => Step::Move(area, false),
            8 => Step::Move(area, true),
            9 => Step::MoveOver(area, random.below(AREAS)),
            10 => Step::Poke(random.below(64) as u64),
            11 => Step::Peek(random.below(64) as u64),
            12 => Step::Rest(area),
            FORK => Step::Fork(self.steps_of_child(random)),
            _ => Step::Away(area),
        }
    }

    fn steps_of_child(&self, random: &mut Random) -> Vec<Step> {
        let mut weights = self.0;
        weights[FORK] = 0;
        weights[DROP] = weights[0];
        weights[MOVE_AND_STAY] = weights[0];
        let length = random.below(5);
        let mut steps: Vec<Step> = (0..length).map(|_| Weights(weights).step(random)).collect();
        if random.below(2) == 0 {
            steps.insert(random.below(steps.len() + 1), Step::Connect);
        }
        if random.below(KILLED) == 0 {
            steps.push(Step::Kill);
        }
        steps
    }
}

impl fmt::Display for History {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "limit {} pages, stage {} places, {} handlers, shared places {}, locked place {:?}, forks prepared {}, carried off {}, accesses tracked {}, {:?}",
            self.limit,
            self.stage,
            self.handlers,
            self.share_places,
            self.locked,
            self.prepared,
            self.carries,
            self.tracked,
            self.adversity
        )?;
        for (number, steps) in self.threads.iter().enumerate() {
            writeln!(out, "thread {number}: {steps:?}")?;
        }
        Ok(())
    }
}
