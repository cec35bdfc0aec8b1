//! Bugs of this repository's past. Each is a small switch in the code that fixed it: the simulation puts
//! it back, to show that it would be found. Elsewhere the switches are constants.

/// A bug, named after what went wrong, with the commit that fixed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// e8ada87: a fault took another fault's claim of the same page and slot for its own.
    ClaimsWithoutNumbers,
    /// e2a24a7: readahead brought in zeros that `madvise` dropped afterwards.
    ZerosBesideMadvise,
    /// 9d4febf: pages that `madvise` was about to drop became managed, and were preserved.
    DropUnknownWhereUnmanaged,
    /// fe33c2e: pages that `madvise` was about to drop were moved out, and came back.
    DroppedPagesMovedOut,
    /// 0fd2cf3: a child was taken to contain what was read before its fork, whatever it had mapped.
    ForkTakenByReadOrder,
    /// 37ee88a: a child kept what was not mapped any more at its fork.
    ForkNotCompared,
    /// 2b73378: the stage was not read before a fork's event let the parent go.
    StageReadAfterFork,
    /// 37ee88a: events were applied in the order in which they were read.
    EventsInReadOrder,
    /// 37ee88a: events were applied before all of them were there.
    EventsNotAwaited,
    /// 37ee88a: the unmapping that follows a move was applied to what was mapped there since.
    EchoesApplied,
    /// 5a86423: a command was done only after the helper had left the gate.
    #[cfg_attr(
        not(simulated),
        expect(dead_code, reason = "the helper's, of which the model has its own")
    )]
    DoneOutsideGate,
    /// 5a86423: a late fault put zeros where a page had just been moved out.
    ZerosWithoutClaim,
    /// cc636dd, 960bdfa: pages that the kernel moved and did not report were taken for missing.
    MovesForgotten,
    /// 7c7a6b9: a gate was left that had not been entered.
    GateLeftUnentered,
    /// fe33c2e: a batch that was executed before an event was settled after it.
    SettledTooLate,
    /// A helper that waited for a page did not see the supervisor die, and nothing else killed its program.
    HelperUnguarded,
    /// Pages above 2^47 bytes shared their entries with others.
    HighPagesShareEntries,
    /// A parent was killed before the event of a move was read: what its child had paged out there read as
    /// zeros.
    UnreadMovesIgnored,
    /// fe33c2e: a batch planned before an event was executed after it.
    StaleBatchExecuted,
    /// What was withheld from children before it was registered moved without an event: no child was given it.
    WithheldUnregistered,
    /// What was mapped where something had been withheld became managed, and children read zeros there.
    ManagedUnwithheld,
    /// What moved after the withheld mappings were listed for a fork was not given to the child.
    GivenUnchecked,
    /// What the helper marked was not checked to be what was registered: where a program had moved unregistered memory
    /// there meanwhile, that was withheld, moved without an event, and was not given to children.
    StrayUnnoticed,
    /// A `madvise` was taken to be over as soon as its event was read.
    DropsTakenForOver,
    /// A `madvise` whose thread ran for long was taken to be over while it still dropped pages.
    #[cfg_attr(
        not(simulated),
        expect(
            dead_code,
            reason = "the kernel's lock, of which the model has its own"
        )
    )]
    ZappingNotAwaited,
    /// What was carried off was settled when its event was read, and not before others were.
    CarriedSettledLate,
    /// What others had moved to where a run was carried off from was taken to be there.
    CarriedOverrun,
    /// A helper that was relieved, as the pages of its run had gone otherwise, took for carried off what was mapped there
    /// since, of which no event comes.
    #[cfg_attr(
        not(simulated),
        expect(dead_code, reason = "the helper's, of which the model has its own")
    )]
    CarriedUnreported,
    /// What `madvise` had freed and was written again, and then moved to where a run was carried off from, was taken for
    /// empty.
    CarriedFreed,
    /// What was mapped anew, and was registered but not managed as yet, was taken for dead when it was carried off.
    CarriedUnmanaged,
    /// What was mapped anew and managed was taken for dead when it was carried off and then moved away.
    CarriedManaged,
    /// What was moved, registered but not managed as yet, to where a run was carried off from was taken for empty.
    CarriedUntold,
    /// A run that was carried off was forgotten if the read that followed failed.
    CarriedForgotten,
    /// Where forks are prepared, what was mapped anew was registered before the unmapping of what it replaced was applied.
    ManagedRegistered,
    /// 05f854e: a thread that all programs need tried the gate of one for a while, and then entered it to serve
    /// a fault, however long that took.
    GateEnteredTwice,
    /// The helper did not mark what it had withheld of a range that was mapped only in part by then: no child was given it.
    WithheldUnmarked,
    /// What was mapped beside a fork, where the forking thread then withheld what it had given, was taken for what the
    /// program keeps from its children itself.
    KeptByMistake,
    /// Places of the stage of which the helper could not free all pages were taken for empty. Not of the past.
    DropsTakenForDone,
    /// Of no child beside whose fork mappings changed it was looked for which of the changes it contains.
    ChildrenRefused,
    /// A thread that helps the reclaimer did not wake it, which waited for that without a limit.
    HelpAwaitedForGood,
    /// Handlers were not reminded of messages that a failed read left unread.
    #[cfg_attr(
        not(simulated),
        expect(
            dead_code,
            reason = "the governor's, of which the simulation has its own"
        )
    )]
    NotReminded,
}

impl Bug {
    /// Those that the simulation finds within two minutes.
    #[cfg(simulated)]
    pub const ALL: [Bug; 19] = [
        Bug::DroppedPagesMovedOut,
        Bug::ForkTakenByReadOrder,
        Bug::ForkNotCompared,
        Bug::StageReadAfterFork,
        Bug::EventsInReadOrder,
        Bug::EventsNotAwaited,
        Bug::EchoesApplied,
        Bug::DoneOutsideGate,
        Bug::ZerosWithoutClaim,
        Bug::MovesForgotten,
        Bug::GateLeftUnentered,
        Bug::SettledTooLate,
        Bug::HelperUnguarded,
        Bug::HighPagesShareEntries,
        Bug::UnreadMovesIgnored,
        Bug::StaleBatchExecuted,
        Bug::WithheldUnregistered,
        Bug::ManagedUnwithheld,
        Bug::DropsTakenForOver,
    ];

    /// Those that it finds in longer searches, or did not find yet.
    #[cfg(simulated)]
    pub const RARE: [Bug; 10] = [
        Bug::ZerosBesideMadvise,
        Bug::CarriedUnmanaged,
        Bug::CarriedForgotten,
        Bug::ClaimsWithoutNumbers,
        Bug::DropUnknownWhereUnmanaged,
        Bug::StrayUnnoticed,
        Bug::ZappingNotAwaited,
        Bug::GivenUnchecked,
        Bug::KeptByMistake,
        Bug::DropsTakenForDone,
    ];

    /// Where the kernel moves no pages. Not of the past: each is what the code would be without a line of it.
    #[cfg(simulated)]
    pub const OF_CARRYING: [Bug; 6] = [
        Bug::CarriedSettledLate,
        Bug::CarriedOverrun,
        Bug::CarriedFreed,
        Bug::CarriedManaged,
        Bug::CarriedUntold,
        Bug::CarriedUnreported,
    ];

    /// After which a program waits for good. Not of the past either.
    #[cfg(simulated)]
    pub const OF_HANGS: [Bug; 2] = [Bug::HelpAwaitedForGood, Bug::NotReminded];

    /// Not of bytes, but of time: a scenario of its own shows it (`simulation/held_gate.rs`).
    #[cfg(simulated)]
    pub const OF_TIME: [Bug; 1] = [Bug::GateEnteredTwice];

    /// Whether the simulation has put it back.
    #[cfg(not(simulated))]
    #[inline(always)]
    #[expect(clippy::unused_self, reason = "as in the simulation")]
    pub const fn is_back(self) -> bool {
        false
    }

    /// Whether the simulation has put it back, on this thread.
    #[cfg(simulated)]
    pub fn is_back(self) -> bool {
        BACK.get() == Some(self)
    }

    /// Puts one back on this thread, or none.
    #[cfg(simulated)]
    pub fn put_back(bug: Option<Bug>) {
        BACK.set(bug);
    }
}

#[cfg(simulated)]
thread_local! {
    static BACK: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}
