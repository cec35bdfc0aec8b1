//! The orderings of the kernel that docs/design.md builds on, each as one short history: what both the model
//! and this kernel must show.

use memfold_simulation::simulation::conformance::compare;
use memfold_simulation::simulation::conformance::linux::Linux;
use memfold_simulation::simulation::conformance::operation::{Call, Operation, Pages, Request};

/// A thread of the program, and the other one; the first child's.
const ONE: usize = 1;
const TWO: usize = 2;
const CHILD: usize = 3;
const HELPER: usize = 0;

fn by(thread: usize, call: Call) -> Operation {
    Operation::By(thread, call)
}

/// memfold's request about the program.
fn ask(request: Request) -> Operation {
    Operation::To(0, request)
}

/// Reads one event, behind all faults.
const READ: Operation = Operation::To(0, Request::Receive(1));
/// Pages 0 to 6 are mapped.
const HERE: Pages = Pages(0, 6);
/// So are these in some histories.
const THERE: Pages = Pages(8, 6);

/// After an operation both kernels must say each of these.
type Expected = (Operation, &'static [(&'static str, &'static str)]);

/// Registers pages 0 to 6, of which 1 and 3 were written, and does the rest. Does nothing without
/// userfaultfds.
fn both_show(rest: &[Expected]) {
    if let Err(error) = Linux::start() {
        let missing = format!("root and a userfaultfd with fork events ({error})");
        return memfold_testing::skip(&missing);
    }
    let before = [
        by(ONE, Call::Map(HERE)),
        by(ONE, Call::Write(1, 0x11)),
        by(ONE, Call::Write(3, 0x33)),
        ask(Request::RegisterProtectable(HERE)),
    ];
    let history: Vec<Operation> = { before.iter().copied() }
        .chain(rest.iter().map(|(operation, _)| *operation))
        .collect();
    let steps = compare(&history).expect("a program");
    let steps = steps.unwrap_or_else(|difference| panic!("{difference}"));
    assert_eq!(steps.len(), history.len(), "each operation is possible");
    for ((operation, expected), step) in rest.iter().zip(&steps[before.len()..]) {
        for (what, how) in *expected {
            let said = step.facts.said().iter().find(|(name, _)| name == what);
            let found = said.map(|(_, how)| how.as_str());
            assert_eq!(found, Some(*how), "{what} after {operation:?}");
        }
    }
}

const IN_EVENT: &str = "waits: Event";
const IN_FAULT: &str = "waits: Fault";
const AGAIN: &str = "Err((0, Errno(11)))";
const CHANGING: &str = "process 0, changing";
const RESIDENT: &str = "process 0, resident";

#[test]
fn faults_are_read_before_events_that_came_earlier() {
    both_show(&[
        (by(ONE, Call::Unmap(Pages(3, 3))), &[("thread 1", IN_EVENT)]),
        (by(TWO, Call::Write(0, 0x22)), &[("thread 2", IN_FAULT)]),
        (
            ask(Request::Receive(2)),
            &[
                ("order of faults and events", "[true, false]"),
                (
                    "messages",
                    "[\"thread 2 faults on 0, write true, protected false\", \"unmap 3..6\"]",
                ),
                ("thread 1", "Done"),
                ("thread 2", IN_FAULT),
            ],
        ),
    ]);
}

#[test]
fn pages_do_not_change_while_an_event_is_unread() {
    both_show(&[
        (
            by(ONE, Call::Unmap(Pages(5, 1))),
            &[("thread 1", IN_EVENT), (CHANGING, "true")],
        ),
        (ask(Request::CopyIn(Pages(0, 1), 7)), &[("result", AGAIN)]),
        (ask(Request::PutPage(0, 7)), &[("result", AGAIN)]),
        (ask(Request::Zero(0)), &[("result", AGAIN)]),
        (ask(Request::Protect(HERE)), &[("result", "Err(Errno(11))")]),
        (
            ask(Request::IsRegistered(Pages(0, 2))),
            &[("result", "false")],
        ),
        (
            by(HELPER, Call::Move(Pages(1, 1), 0)),
            &[("helper", "Moved(0, Errno(11))")],
        ),
        (READ, &[("thread 1", "Done"), (CHANGING, "false")]),
        (
            ask(Request::IsRegistered(Pages(0, 2))),
            &[("result", "true")],
        ),
        (
            by(HELPER, Call::Move(Pages(1, 1), 0)),
            &[("helper", "Moved(1, Errno(0))")],
        ),
        (
            ask(Request::CopyIn(Pages(1, 1), 7)),
            &[("result", "Ok(())")],
        ),
    ]);
}

#[test]
fn two_unread_events_are_two_changes() {
    both_show(&[
        (by(ONE, Call::Unmap(Pages(5, 1))), &[("thread 1", IN_EVENT)]),
        (by(TWO, Call::Unmap(Pages(4, 1))), &[("thread 2", IN_EVENT)]),
        (
            READ,
            &[("messages", "[\"unmap 5..6\"]"), (CHANGING, "true")],
        ),
        (ask(Request::Zero(0)), &[("result", AGAIN)]),
        (
            READ,
            &[("messages", "[\"unmap 4..5\"]"), (CHANGING, "false")],
        ),
    ]);
}

#[test]
fn a_mapping_is_gone_before_its_unmap_event_is_read() {
    both_show(&[
        (
            by(ONE, Call::Unmap(Pages(0, 3))),
            &[("thread 1", IN_EVENT), (RESIDENT, "Ok([3..4])")],
        ),
        (by(TWO, Call::Read(1)), &[("thread 2", "Unmapped")]),
        (READ, &[("thread 1", "Done")]),
    ]);
}

#[test]
fn madvise_drops_pages_after_its_event_is_read() {
    both_show(&[
        (
            by(ONE, Call::Drop(HERE)),
            &[("thread 1", IN_EVENT), (RESIDENT, "Ok([1..2, 3..4])")],
        ),
        // Until then they are as they were.
        (by(TWO, Call::Read(1)), &[("thread 2", "Contents(17)")]),
        (
            READ,
            &[
                ("messages", "[\"remove 0..6\"]"),
                ("thread 1", "Done"),
                (RESIDENT, "Ok([])"),
            ],
        ),
    ]);
}

#[test]
fn madvise_drops_nothing_where_its_beginning_was_unmapped() {
    both_show(&[
        (by(ONE, Call::Drop(HERE)), &[("thread 1", IN_EVENT)]),
        (by(TWO, Call::Unmap(Pages(0, 1))), &[("thread 2", IN_EVENT)]),
        (
            READ,
            &[
                ("thread 1", "Failed(Errno(12))"),
                (RESIDENT, "Ok([1..2, 3..4])"),
            ],
        ),
        (
            READ,
            &[("messages", "[\"unmap 0..1\"]"), ("thread 2", "Done")],
        ),
    ]);
}

#[test]
fn a_move_is_reported_between_two_unmappings() {
    both_show(&[
        (by(TWO, Call::Map(THERE)), &[]),
        (ask(Request::RegisterProtectable(THERE)), &[]),
        (
            by(ONE, Call::Remap(Pages(0, 4), 8, false)),
            &[("thread 1", IN_EVENT), (RESIDENT, "Ok([9..10, 11..12])")],
        ),
        // What lay at the target; the move; the source, as if it were unmapped.
        (
            READ,
            &[
                ("messages", "[\"unmap 8..12\"]"),
                ("thread 1", IN_EVENT),
                (CHANGING, "true"),
            ],
        ),
        (
            READ,
            &[
                ("messages", "[\"remap 0..4 to 8\"]"),
                ("thread 1", IN_EVENT),
                (CHANGING, "true"),
            ],
        ),
        (
            READ,
            &[
                ("messages", "[\"unmap 0..4\"]"),
                ("thread 1", "Done"),
                (CHANGING, "false"),
            ],
        ),
    ]);
}

#[test]
fn a_mapping_that_stays_behind_is_empty_registered_and_has_no_echo() {
    both_show(&[
        (
            by(ONE, Call::Remap(HERE, 8, true)),
            &[("thread 1", IN_EVENT)],
        ),
        (
            READ,
            &[
                ("messages", "[\"remap 0..6 to 8\"]"),
                ("thread 1", "Done"),
                (RESIDENT, "Ok([9..10, 11..12])"),
            ],
        ),
        (ask(Request::IsRegistered(HERE)), &[("result", "true")]),
        (by(ONE, Call::Write(1, 5)), &[("thread 1", IN_FAULT)]),
    ]);
}

#[test]
fn a_child_begins_when_its_fork_event_is_read_with_what_was_mapped_at_the_fork() {
    both_show(&[
        (by(ONE, Call::Fork(1)), &[("thread 1", IN_EVENT)]),
        // After the copy: the child has it, though the parent's event may be read first or last.
        (by(TWO, Call::Unmap(Pages(3, 1))), &[("thread 2", IN_EVENT)]),
        (
            READ,
            &[
                ("messages", "[\"fork\"]"),
                ("thread 1", "Forked"),
                ("process 1, resident", "Ok([1..2, 3..4])"),
                ("process 1, contents", "Ok([17, 51])"),
            ],
        ),
        (READ, &[("messages", "[\"unmap 3..4\"]")]),
        (
            Operation::To(1, Request::IsRegistered(HERE)),
            &[("result", "true")],
        ),
        (by(CHILD, Call::Read(0)), &[("thread 3", IN_FAULT)]),
        (
            Operation::To(1, Request::Zero(0)),
            &[("thread 3", "Contents(0)")],
        ),
    ]);
}

#[test]
fn pages_that_a_fork_shared_do_not_move_before_they_are_written() {
    both_show(&[
        (by(ONE, Call::Fork(1)), &[]),
        (READ, &[("thread 1", "Forked")]),
        (
            by(HELPER, Call::Move(Pages(1, 1), 0)),
            &[("helper", "Moved(0, Errno(16))")],
        ),
        // Even when the child is gone.
        (Operation::Exit(1), &[]),
        (
            by(HELPER, Call::Move(Pages(1, 1), 0)),
            &[("helper", "Moved(0, Errno(16))")],
        ),
        (by(ONE, Call::Populate(1)), &[("thread 1", "Done")]),
        (
            by(HELPER, Call::Move(Pages(1, 1), 0)),
            &[("helper", "Moved(1, Errno(0))")],
        ),
    ]);
}

#[test]
fn protection_is_reported_once_and_by_the_page() {
    both_show(&[
        (ask(Request::Protect(HERE)), &[("result", "Ok(())")]),
        (by(ONE, Call::Read(1)), &[("thread 1", "Contents(17)")]),
        (by(ONE, Call::Write(1, 5)), &[("thread 1", IN_FAULT)]),
        (
            ask(Request::Receive(8)),
            &[(
                "messages",
                "[\"thread 1 faults on 1, write true, protected true\"]",
            )],
        ),
        // Woken alone, it faults again.
        (ask(Request::Wake(HERE)), &[("thread 1", IN_FAULT)]),
        (
            ask(Request::Unprotect(Pages(1, 1))),
            &[("result", "Ok(())"), ("thread 1", "Done")],
        ),
        (by(ONE, Call::Write(3, 5)), &[("thread 1", IN_FAULT)]),
    ]);
}

#[test]
fn a_copy_stops_at_what_is_there_and_spans_one_mapping() {
    both_show(&[
        // Pages 1 and 3 are there.
        (
            ask(Request::CopyIn(Pages(2, 3), 7)),
            &[("result", "Err((1, Errno(11)))")],
        ),
        (
            ask(Request::CopyIn(Pages(3, 1), 7)),
            &[("result", "Err((0, Errno(17)))")],
        ),
        (
            ask(Request::CopyIn(Pages(4, 4), 7)),
            &[("result", "Err((0, Errno(2)))")],
        ),
        // Without a wake the thread waits on.
        (by(ONE, Call::Read(0)), &[("thread 1", IN_FAULT)]),
        (
            ask(Request::PutPage(0, 7)),
            &[("result", "Ok(())"), ("thread 1", IN_FAULT)],
        ),
        (
            ask(Request::Wake(Pages(0, 1))),
            &[("thread 1", "Contents(7)")],
        ),
    ]);
}

#[test]
fn what_is_carried_off_is_at_its_places_before_the_event_is_read() {
    both_show(&[
        (by(ONE, Call::Map(THERE)), &[]),
        (by(ONE, Call::Keep(THERE)), &[("thread 1", "Done")]),
        (
            by(ONE, Call::Carry(Pages(0, 4), 9)),
            &[
                ("thread 1", IN_EVENT),
                (CHANGING, "true"),
                (RESIDENT, "Ok([10..11, 12..13])"),
            ],
        ),
        // Until then nothing can be filled in where they were, nor at their places.
        (ask(Request::CopyIn(Pages(1, 1), 7)), &[("result", AGAIN)]),
        (
            READ,
            &[
                ("messages", "[\"remap 0..4 to 9\"]"),
                ("thread 1", "Done"),
                (CHANGING, "false"),
            ],
        ),
        // It is registered there, too, and the source still is.
        (by(TWO, Call::Read(9)), &[("thread 2", IN_FAULT)]),
        (
            ask(Request::CopyIn(Pages(9, 1), 7)),
            &[("result", "Ok(())"), ("thread 2", "Contents(7)")],
        ),
        (by(TWO, Call::Write(1, 0x22)), &[("thread 2", IN_FAULT)]),
        // What is left of the stage, and what was carried there, no child has.
        (by(ONE, Call::Fork(1)), &[("thread 1", IN_EVENT)]),
        (
            Operation::To(0, Request::Receive(2)),
            &[
                (
                    "messages",
                    "[\"thread 2 faults on 1, write true, protected false\", \"fork\"]",
                ),
                ("thread 1", "Forked"),
            ],
        ),
        (
            Operation::By(CHILD, Call::Read(10)),
            &[("thread 3", "Unmapped")],
        ),
    ]);
}
