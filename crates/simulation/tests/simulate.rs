//! The pager's core under the model of Linux. docs/testing.md says how to replay a seed, and how to add a
//! case.

use memfold_simulation::bugs::Bug;
use memfold_simulation::simulation::adversity::{Adversity, compared};
use memfold_simulation::simulation::explore::{
    Failure, check, check_in, schedules_of, shorten, try_for, try_run,
};
use memfold_simulation::simulation::history::{AREA_PAGES, History, Step};
use memfold_simulation::simulation::{
    doubtful, ended_helper, held_gate, lost_pages, progress, spared_pages, unposted,
};
use std::panic;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Longest search for a shorter history that fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time in which each bug of the past must be found, and histories that are tried whatever time they take.
const LONGEST_SEARCH: Duration = Duration::from_secs(120);
const LEAST_SEARCH: u64 = 1000;

/// Seconds of histories; `.ci/run` searches longer, and `memfold-lab simulate` without an end.
fn seconds() -> Duration {
    let seconds = std::env::var("MEMFOLD_SIMULATE_SECONDS");
    let seconds = seconds.map_or(4, |seconds| seconds.parse().expect("a number of seconds"));
    Duration::from_secs(seconds)
}

/// Panics of executions are reported by their seed.
fn silence_panics_of_executions() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let is_of_test = panic
            .location()
            .is_some_and(|location| location.file().ends_with("simulate.rs"));
        if is_of_test {
            report(panic);
        }
    }));
}

/// Executes histories for that time, however many there are, and at least `least`, however long they take: a busy
/// machine gets through fewer. `None` of a seed without such a history.
fn search_for(least: u64, execute: impl Fn(u64) -> Option<Result<(), Failure>>) {
    silence_panics_of_executions();
    let (began, mut histories) = (Instant::now(), 0);
    for seed in search_from().. {
        if histories >= least && began.elapsed() >= seconds() {
            break;
        }
        let Some(outcome) = execute(seed) else {
            continue;
        };
        histories += 1;
        if let Err(failure) = outcome {
            panic!("seed {seed}: {}", shorten(failure, None, PATIENCE));
        }
    }
    let (compared, unclear) = compared();
    println!("{histories} histories; {unclear} of {compared} children beside changes were refused");
    assert!(
        are_few_refused((compared, unclear)),
        "{unclear} of {compared} children beside changes were refused"
    );
    let (executions, cut_off) = progress::executions();
    println!("{cut_off} of {executions} executions were cut off in schedules that are not fair");
}

/// Whether of most children that were forked beside changes it showed which of them they contain. memfold kills the others.
fn are_few_refused((compared, unclear): (u64, u64)) -> bool {
    const MOST: u64 = 4;
    /// Of so few, each may be one of these.
    const FEW: u64 = 20;
    compared < FEW || unclear * MOST <= compared
}

#[test]
fn children_that_are_refused_without_need_are_noticed() {
    silence_panics_of_executions();
    let seeds = (0..100).filter(|seed| check(*seed, Some(Bug::ChildrenRefused)).is_ok());
    let passed = seeds.count();
    let refused = compared();
    assert!(passed > 0 && !are_few_refused(refused), "{refused:?}");
}

#[test]
fn every_page_holds_what_it_must() {
    search_for(100, |seed| Some(check(seed, None)));
}

/// Executes the history of a seed with its forks prepared, in the schedules of another; `None` if it has none.
fn check_prepared(seed: u64, schedules: u64, bug: Option<Bug>) -> Option<Result<(), Failure>> {
    const SCHEDULES: usize = 3;
    let mut history = History::of_seed(seed);
    let mut steps = history.threads.iter().flatten();
    if !steps.any(|step| matches!(step, Step::Fork(_))) {
        return None;
    }
    history.prepared = true;
    Bug::put_back(bug);
    let outcome = try_run(&history, schedules, SCHEDULES);
    Some(outcome.map_err(|why| Failure {
        seed: schedules,
        history,
        schedules: SCHEDULES,
        why,
    }))
}

/// The same with all forks prepared, where there are any.
#[test]
fn prepared_forks_see_one_moment() {
    search_for(50, |seed| check_prepared(seed, schedules_of(seed), None));
}

/// A thread unmaps memory that is about to be withheld, and maps less there, before another forks: the child has it.
#[test]
fn memory_that_was_withheld_in_part_is_given_to_children() {
    const SEEDS: u64 = 3000;
    silence_panics_of_executions();
    let check = |seed, bug| check_prepared(seed, seed, bug);
    let found = |seed| Some((seed, check(seed, Some(Bug::WithheldUnmarked))?.err()?));
    let (seed, failure) = (0..SEEDS).find_map(found).expect("the bug is found");
    assert_eq!(failure.why, "a page is not mapped");
    if let Some(Err(failure)) = check(seed, None) {
        panic!("seed {seed}: {failure}");
    }
}

/// A thread maps memory over its own, another forks, and its forks are prepared.
fn check_mapped_over(seed: u64, bug: Option<Bug>) -> Result<(), Failure> {
    const SCHEDULES: usize = 3;
    const ROUNDS: u64 = 4;
    let mut history = History::of_seed(seed);
    let mut mapper = vec![Step::Map(0, AREA_PAGES), Step::Fill(0)];
    let mut forker = vec![Step::Map(0, 2), Step::Fill(0), Step::Rest(0)];
    for round in 1..=ROUNDS {
        mapper.extend([Step::Rest(0), Step::Pause(seed * round % 30)]);
        mapper.extend([Step::MapOver(0), Step::Fill(0)]);
        forker.extend([Step::Fork(vec![]), Step::Fork(vec![])]);
        forker.push(Step::Pause(seed * round % 20));
    }
    history.threads = vec![mapper, forker];
    (history.limit, history.locked, history.carries) = (12, None, false);
    (history.prepared, history.adversity) = (true, Adversity::default());
    Bug::put_back(bug);
    try_run(&history, seed, SCHEDULES).map_err(|why| Failure {
        seed,
        history,
        schedules: SCHEDULES,
        why,
    })
}

/// The child of the next fork has it, too.
#[test]
fn memory_that_was_mapped_over_beside_a_fork_is_given_to_children() {
    silence_panics_of_executions();
    const SEEDS: u64 = 1000;
    let found = |seed| {
        Some((
            seed,
            check_mapped_over(seed, Some(Bug::KeptByMistake)).err()?,
        ))
    };
    let (seed, failure) = (0..SEEDS).find_map(found).expect("the bug is found");
    assert_eq!(failure.why, "a page is not mapped");
    for seed in (0..20).chain([seed]) {
        if let Err(failure) = check_mapped_over(seed, None) {
            panic!("seed {seed}: {failure}");
        }
    }
}

/// Executes the history of a seed without `UFFDIO_MOVE`, in the schedules of another.
fn check_carried(seed: u64, schedules: u64, bug: Option<Bug>) -> Result<(), Failure> {
    const SCHEDULES: usize = 3;
    let mut history = History::of_seed(seed);
    history.carries = true;
    if bug == Some(Bug::CarriedOverrun) || seed.is_multiple_of(MOVES_BESIDE) {
        move_beside(&mut history);
    } else if bug == Some(Bug::CarriedForgotten) || seed % MOVES_BESIDE == 5 {
        fork_beside(&mut history);
    } else if bug == Some(Bug::CarriedUnreported) || seed % MOVES_BESIDE == 1 {
        map_anew(&mut history);
    } else if bug == Some(Bug::CarriedUnmanaged) {
        map_anew(&mut history);
        // What is to be withheld is registered for longer before it is managed.
        history.prepared = true;
    } else if bug == Some(Bug::CarriedFreed) || seed % MOVES_BESIDE == 2 {
        free_beside(&mut history);
    } else if bug == Some(Bug::CarriedUntold) || seed % MOVES_BESIDE == 4 {
        move_over(&mut history);
    } else if seed % MOVES_BESIDE == 3 {
        move_anew(&mut history);
    }
    // Of others no event comes that leaves memfold in doubt.
    let may_be_killed = bug.is_some() || (1..=5).contains(&(seed % MOVES_BESIDE));
    Bug::put_back(bug);
    match try_run(&history, schedules, SCHEDULES) {
        Ok(()) => Ok(()),
        // Rather than read what may not be its own: docs/limits.md.
        Err(why) if may_be_killed && why.ends_with("is killed") => Ok(()),
        Err(why) => Err(Failure {
            seed: schedules,
            history,
            schedules: SCHEDULES,
            why,
        }),
    }
}

/// One in `MOVES_BESIDE` histories has two threads that move memory to where the other one's was.
const MOVES_BESIDE: u64 = 8;

/// The first steps of a thread: it maps and writes a large and a small area, and lets the large one become managed.
fn two_areas() -> Vec<Step> {
    vec![
        Step::Map(0, AREA_PAGES),
        Step::Fill(0),
        Step::Map(1, 2),
        Step::Fill(1),
        Step::Rest(0),
    ]
}

/// Gives a history threads that map at the same addresses.
fn share_places_of(history: &mut History, threads: Vec<Vec<Step>>) {
    history.threads = threads;
    (history.share_places, history.limit, history.locked) = (true, 13, None);
}

fn move_beside(history: &mut History) {
    let mover = |area| {
        let mut steps = two_areas();
        for _ in 0..4 {
            steps.extend([
                Step::Move(area, false),
                Step::Check(area),
                Step::Fill(1 - area),
            ]);
        }
        steps
    };
    share_places_of(history, vec![mover(0), mover(1)]);
}

/// The same, and another thread forks, of which the event cannot be read now and then. The children end at once.
fn fork_beside(history: &mut History) {
    move_beside(history);
    history.threads.push(vec![Step::Fork(vec![]); 8]);
    (history.prepared, history.limit) = (false, 20);
    (
        history.adversity.unread_forks,
        history.adversity.late_helper,
    ) = (true, true);
}

/// Two threads unmap memory and map memory there again, which is not registered as yet.
fn map_anew(history: &mut History) {
    let mut steps = two_areas();
    for _ in 0..4 {
        steps.extend([Step::Unmap(0), Step::Map(0, AREA_PAGES), Step::Fill(0)]);
        steps.extend([Step::Unmap(1), Step::Map(1, 2), Step::Fill(1)]);
        steps.extend([Step::Rest(0), Step::Check(0)]);
    }
    share_places_of(history, vec![steps; 2]);
}

/// Two threads move memory to where the other one's was. One has freed it before, and written it again, which raises no
/// fault.
fn free_beside(history: &mut History) {
    let mover = |area| {
        let mut steps = two_areas();
        for _ in 0..4 {
            if area == 0 {
                steps.extend([Step::Free(0), Step::Write(0, 0), Step::Write(0, 1)]);
            }
            steps.extend([Step::Move(0, false), Step::Check(0), Step::Fill(1)]);
            if area == 1 {
                steps.push(Step::Fill(0));
            }
        }
        steps
    };
    share_places_of(history, vec![mover(0), mover(1)]);
}

/// One thread unmaps memory and maps memory there again, and another moves memory there and away.
fn move_anew(history: &mut History) {
    let mut owner = two_areas();
    let mut mover = Vec::new();
    for _ in 0..4 {
        owner.extend([Step::Unmap(0), Step::Map(0, AREA_PAGES), Step::Fill(0)]);
        owner.extend([Step::Rest(0), Step::Fill(1), Step::Check(0)]);
        mover.extend([Step::Map(0, AREA_PAGES), Step::Fill(0), Step::Rest(0)]);
        mover.extend([Step::Move(0, false), Step::Check(0), Step::Unmap(0)]);
    }
    share_places_of(history, vec![owner, mover]);
}

/// Two threads move memory over memory that may be being carried off, and another forks, so that what is to be moved is
/// registered for longer before it is withheld, and managed.
fn move_over(history: &mut History) {
    let mut mover = vec![Step::Map(0, AREA_PAGES), Step::Fill(0), Step::Rest(0)];
    for round in 0..4 {
        mover.extend([Step::Map(1, AREA_PAGES), Step::Fill(1)]);
        mover.push(Step::Pause(history.seed % 40 + round));
        mover.extend([Step::MoveOver(1, 0), Step::Check(0), Step::Rest(0)]);
    }
    let fork = || [Step::Fork(vec![]), Step::Pause(5)];
    let forker = (0..6).flat_map(|_| fork()).collect();
    history.threads = vec![mover.clone(), forker, mover];
    (history.share_places, history.limit, history.locked) = (true, 8, None);
    history.prepared = true;
}

/// A thread unmaps memory that is about to be carried off, and another maps more there, which is to be withheld from
/// children: it is not registered before the unmapping is known. Else it may be carried off, for which the program is stopped.
#[test]
fn memory_that_is_mapped_anew_and_withheld_is_not_carried_off() {
    const FIRST: u64 = 7880;
    const SEEDS: u64 = 8000;
    const SCHEDULES: usize = 3;
    silence_panics_of_executions();
    let check = |seed, bug| {
        let mut history = History::of_seed(seed);
        map_anew(&mut history);
        (history.carries, history.prepared) = (true, true);
        Bug::put_back(bug);
        try_run(&history, seed, SCHEDULES)
    };
    let found = |seed| {
        let why = check(seed, Some(Bug::ManagedRegistered)).err()?;
        assert!(why.contains("is killed"), "{why}");
        Some(seed)
    };
    let seed = (FIRST..FIRST + SEEDS).find_map(found);
    let seed = seed.expect("the bug is found");
    if let Err(why) = check(seed, None) {
        panic!("{why}");
    }
}

/// The same where the kernel moves no pages.
#[test]
fn pages_that_are_carried_off_hold_what_they_must() {
    search_for(100, |seed| {
        Some(check_carried(seed, schedules_of(seed), None))
    });
}

/// A history without adversity, whose threads map at the same addresses. The limit and the stage are in pages.
fn of_threads(threads: Vec<Vec<Step>>, (limit, stage): (u64, u64)) -> History {
    History {
        threads,
        share_places: true,
        limit,
        stage,
        handlers: 1,
        adversity: Adversity::default(),
        locked: None,
        prepared: false,
        carries: false,
        tracked: false,
        seed: 0,
    }
}

/// A run of two mappings is carried off by halves, as another thread had moved the second to where the first was.
#[test]
fn pages_of_a_run_that_moved_before_it_was_carried_off_are_kept() {
    silence_panics_of_executions();
    let mover = vec![
        Step::Map(0, 6),
        Step::Fill(0),
        Step::Rest(0),
        Step::Move(0, false),
    ];
    let history = History {
        carries: true,
        tracked: false,
        seed: 66207,
        ..of_threads(vec![mover; 2], (9, 11))
    };
    if let Err(why) = try_run(&history, history.seed, 40) {
        panic!("{why}");
    }
}

/// The first seed, for longer searches.
fn search_from() -> u64 {
    std::env::var("MEMFOLD_SIMULATE_SEED").map_or(0, |seed| seed.parse().expect("a number"))
}

/// A row of docs/limits.md is true: what the kernel writes by a reference that is no pin may be lost.
#[test]
fn a_late_write_of_the_kernel_may_be_lost() {
    silence_panics_of_executions();
    let history = |last| History {
        locked: None,
        prepared: false,
        carries: false,
        tracked: false,
        threads: vec![vec![
            Step::Map(0, AREA_PAGES),
            Step::Fill(0),
            Step::Map(1, AREA_PAGES),
            Step::Fill(1),
            Step::Rest(0),
            last,
        ]],
        limit: 8,
        handlers: 1,
        adversity: Adversity::default(),
        ..History::of_seed(4)
    };
    let is_lost = |history: &History| (0..200).any(|seed| try_run(history, seed, 1).is_err());
    assert!(is_lost(&history(Step::LateWrite(0, 1))));
    assert!(!is_lost(&history(Step::Write(0, 1))));
}

/// A row of docs/limits.md is true: of a move that leaves the mapping behind, and whose event is never raised as the
/// program is killed, a child forked beside it knows nothing. Any other move ends the child.
#[test]
fn a_child_may_miss_a_move_of_a_killed_parent_that_leaves_the_mapping() {
    silence_panics_of_executions();
    let history = |stays| {
        let fill = |area| [Step::Map(area, AREA_PAGES), Step::Fill(area)];
        let out = [Step::Rest(0), Step::AwaitPageOut(0)];
        let mover = [fill(0), fill(1), out.clone()].concat();
        let pause = Step::Pause(10);
        History {
            threads: vec![
                [mover, vec![Step::Move(0, stays)]].concat(),
                [&out[..], &[pause, Step::Fork(vec![]), Step::Kill]].concat(),
            ],
            share_places: false,
            limit: 8,
            stage: 4,
            handlers: 1,
            adversity: Adversity {
                late_events: true,
                ..Adversity::default()
            },
            locked: None,
            prepared: false,
            carries: false,
            tracked: false,
            seed: 0,
        }
    };
    let is_missed = |history: &History| (0..100).any(|seed| try_run(history, seed, 1).is_err());
    assert!(is_missed(&history(true)));
    assert!(!is_missed(&history(false)));
}

/// No thread that other programs need waits for the gate of one.
#[test]
fn no_program_waits_for_the_gate_of_another_one() {
    silence_panics_of_executions();
    // With the second seed, the reclaimer has help.
    held_gate::run(0, 100, None);
    held_gate::run(3, 100, None);
    for bug in Bug::OF_TIME {
        let outcome = panic::catch_unwind(|| held_gate::run(0, 400, Some(bug)));
        let why = outcome.expect_err("the bug is found");
        let why = why.downcast_ref::<&str>().copied().unwrap_or_default();
        assert!(
            why.contains("waits for another one's gate"),
            "{bug:?}: {why}"
        );
    }
}

/// Where the kernel tells which pages were accessed, each page holds what it must, too.
#[test]
fn victims_are_chosen_by_accesses() {
    const SCHEDULES: usize = 3;
    search_for(50, |seed| {
        let mut history = History::of_seed(seed);
        history.tracked = true;
        Bug::put_back(None);
        let outcome = try_run(&history, schedules_of(seed), SCHEDULES);
        Some(outcome.map_err(|why| Failure {
            seed: schedules_of(seed),
            history,
            schedules: SCHEDULES,
            why,
        }))
    });
}

#[test]
fn pages_that_are_used_all_the_time_stay() {
    silence_panics_of_executions();
    let misses = |tracked| {
        (0..3)
            .map(|seed| spared_pages::run(seed, 4, tracked))
            .sum::<u64>()
    };
    let (tracked, blind) = (misses(true), misses(false));
    println!(
        "a page that is used all the time was out {blind} times, or {tracked} times where accesses are known"
    );
    assert!(tracked * 4 < blind * 3, "{tracked} for {blind}");
}

#[test]
fn what_a_child_has_lost_its_children_have_lost() {
    silence_panics_of_executions();
    lost_pages::run(0, 20);
}

/// What may be kept from children by mistake is looked at, while other memory is unmapped at each look.
#[test]
fn what_is_kept_from_children_does_not_stay_in_doubt() {
    doubtful::run(0, 20);
}

/// Moves of a program are noted for pages that are being carried off.
#[test]
fn moves_are_not_noted_while_nothing_is_carried_off() {
    unposted::run(0, 20);
}

/// The helper is killed in the gate, where pages are carried off, and another process uses the memory still.
#[test]
fn a_process_outlives_the_helper_of_its_memory() {
    silence_panics_of_executions();
    let ended = (0..4).map(|seed| ended_helper::run(seed, 50));
    assert!(ended.sum::<usize>() > 0, "no helper ended");
}

/// Some forty programs under 16 pages, half of them children without a helper, which have more than that: what one
/// program brings in goes out for the others. Each access takes many steps, but all are made.
#[test]
fn a_slow_history_ends() {
    silence_panics_of_executions();
    let fork = |number: u64| match number % 2 {
        0 => Step::Fork(vec![Step::Connect, Step::Write(0, 1)]),
        _ => Step::Fork(vec![Step::Write(0, number % AREA_PAGES)]),
    };
    let thread: Vec<Step> = [Step::Map(0, AREA_PAGES), Step::Fill(0)]
        .into_iter()
        .chain([Step::Map(1, 2), Step::Fill(1), Step::Rest(0)])
        .chain((0..14).map(fork))
        .collect();
    let history = of_threads(vec![thread; 3], (16, 8));
    for seed in [0, 2, 4] {
        if let Err(why) = try_run(&history, seed, 1) {
            panic!("seed {seed}: {why}");
        }
    }
}

/// Where the search for a bug begins: a little before the seed at which it was found last, so that the test
/// is short. After a change of the histories the search is as long as it takes, within two minutes, or longer on a busy machine.
fn first_seed(bug: Bug) -> u64 {
    match bug {
        Bug::ForkTakenByReadOrder | Bug::ForkNotCompared => 885,
        Bug::StageReadAfterFork => 1575,
        Bug::EchoesApplied => 1520,
        Bug::DoneOutsideGate => 905,
        Bug::ZerosWithoutClaim => 20_790,
        Bug::UnreadMovesIgnored => 340,
        Bug::ManagedUnwithheld => 2000,
        Bug::CarriedSettledLate => 410,
        Bug::StaleBatchExecuted => 100,
        Bug::DropsTakenForOver => 70,
        Bug::CarriedOverrun => 400,
        Bug::CarriedManaged => 490,
        Bug::CarriedUntold => 45,
        _ => 0,
    }
}

/// Searches for a history that fails with a bug and passes without it. `Err` if there is none in time.
fn search(bug: Bug) -> Result<(), String> {
    let began = Instant::now();
    let first = first_seed(bug);
    let is_left = |seed: &u64| seed - first < LEAST_SEARCH || began.elapsed() < LONGEST_SEARCH;
    let mut seeds = (first..).take_while(is_left);
    let check = |seed, bug_or_none| match bug {
        Bug::WithheldUnregistered | Bug::ManagedUnwithheld => {
            check_prepared(seed, seed, bug_or_none).unwrap_or(Ok(()))
        }
        bug if Bug::OF_CARRYING.contains(&bug) => check_carried(seed, seed, bug_or_none),
        _ => check_in(seed, seed, bug_or_none),
    };
    let found = seeds.find_map(|seed| check(seed, Some(bug)).err());
    let Some(Failure { seed, why, .. }) = found else {
        return Err(format!("{bug:?}, from seed {first} on"));
    };
    println!("{bug:?}: seed {seed}, {:?}: {why}", began.elapsed());
    if let Err(failure) = check(seed, None) {
        panic!("without {bug:?}, too: seed {seed}: {failure}");
    }
    Ok(())
}

/// Bugs that the code has not, where the kernel moves no pages.
#[test]
fn each_bug_of_carrying_pages_off_is_found() {
    silence_panics_of_executions();
    let missed = Bug::OF_CARRYING
        .into_iter()
        .filter_map(|bug| search(bug).err());
    let missed: Vec<String> = missed.collect();
    assert!(
        missed.is_empty(),
        "not found in {LONGEST_SEARCH:?}, nor in {LEAST_SEARCH} histories: {missed:?}"
    );
}

/// A program with children that have helpers, in little memory. One seed in four has a thread that helps the reclaimer.
fn with_connected_children(seed: u64) -> History {
    let child = || Step::Fork(vec![Step::Connect, Step::Fill(0), Step::Check(0)]);
    let mut thread = vec![Step::Map(0, AREA_PAGES), Step::Fill(0), Step::Rest(0)];
    thread.extend((0..6).map(|_| child()));
    thread.extend([Step::Fill(0), Step::Check(0)]);
    History {
        share_places: false,
        adversity: Adversity {
            shortages: true,
            ..Adversity::default()
        },
        seed,
        ..of_threads(vec![thread], (12, 8))
    }
}

/// Bugs that the code has not, after which a program waits for good: they end as hangs, with a thread that helps the
/// reclaimer, too.
#[test]
fn each_hang_is_found() {
    /// Fewer steps than where a hang is not expected take less time.
    const MOST_STEPS: usize = 200_000;
    silence_panics_of_executions();
    let history = with_connected_children(3);
    for bug in Bug::OF_HANGS {
        let began = Instant::now();
        let hangs = |schedules, bug_or_none| {
            Bug::put_back(bug_or_none);
            try_for(&history, schedules, 1, MOST_STEPS).err()
        };
        let found = (0..)
            .step_by(2)
            .take_while(|seed| seed / 2 < LEAST_SEARCH || began.elapsed() < LONGEST_SEARCH)
            .find_map(|seed| Some((seed, hangs(seed, Some(bug))?)));
        let (seed, why) = found.unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?}: seed {seed}, {:?}: {why}", began.elapsed());
        assert!(why.contains("max_steps"), "{bug:?}: seed {seed}: {why}");
        assert_eq!(hangs(seed, None), None, "without {bug:?}, too: seed {seed}");
    }
}

#[test]
fn each_past_bug_is_found() {
    const SEARCHERS: usize = 2;
    silence_panics_of_executions();
    let next = AtomicUsize::new(0);
    let searcher = || {
        let bugs = std::iter::from_fn(|| Bug::ALL.get(next.fetch_add(1, Ordering::Relaxed)));
        bugs.filter_map(|bug| search(*bug).err())
            .collect::<Vec<_>>()
    };
    let missed: Vec<String> = thread::scope(|scope| {
        let searchers: Vec<_> = (0..SEARCHERS).map(|_| scope.spawn(searcher)).collect();
        let results = searchers
            .into_iter()
            .map(|searcher| searcher.join().expect("a search"));
        results.flatten().collect()
    });
    assert!(
        missed.is_empty(),
        "not found in {LONGEST_SEARCH:?}, nor in {LEAST_SEARCH} histories: {missed:?}"
    );
}
