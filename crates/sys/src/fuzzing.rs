//! What the fuzz targets run on their input. Tests run the same on the corpus and on random bytes.

use crate::PAGE_SIZE;
use crate::channel::{CHANNEL_BYTES, Channel, DropRun, MoveRun, RUNS_MAX};
use crate::hello::{Filters, Hello};
use crate::memory::Mapping;
use crate::port::{Port, ROBUST_OFFSET};
use crate::process;
use crate::sync::lock;
use crate::thread::RobustList;
use std::cell::RefCell;
use std::mem::offset_of;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The supervisor's end of a channel while the program writes whatever it likes over its own: each
/// byte of the input is a step of the supervisor's or, with those behind it, something written.
pub fn channel(input: &[u8]) {
    thread_local! {
        static PAIR: RefCell<Option<Pair>> = const { RefCell::new(None) };
    }
    PAIR.with_borrow_mut(|pair| {
        let pair = pair.get_or_insert_with(Pair::new);
        let mut input = input.iter().copied();
        while let Some(step) = input.next() {
            if step < 0x80 {
                pair.scribble(step, &mut input);
            } else {
                pair.supervise(step);
            }
        }
        pair.take_outcome();
    });
}

/// Both ends of a channel.
struct Pair {
    port: Port,
    program: Mapping,
    /// A command is posted whose outcome was not taken.
    posted: bool,
}

impl Pair {
    fn new() -> Pair {
        /// The kernel looks at them when their threads end.
        static LISTS: Mutex<Vec<Arc<RobustList>>> = Mutex::new(Vec::new());
        let robust = RobustList::for_current_thread(ROBUST_OFFSET).expect("a robust list");
        let robust = Arc::new(robust);
        let mut lists = lock(&LISTS);
        lists.push(Arc::clone(&robust));
        let (port, file) = Port::create(robust).expect("a channel");
        let program = Mapping::shared(&file, CHANNEL_BYTES).expect("the program's end");
        Pair {
            port,
            program,
            posted: false,
        }
    }

    fn write(&self, place: usize, value: u8) {
        assert!(place < CHANNEL_BYTES);
        // SAFETY: within the mapping, which is shared memory: there are no references to it.
        unsafe { self.program.start().add(place).write_volatile(value) };
    }

    /// The program writes up to eight bytes anywhere.
    fn scribble(&self, step: u8, input: &mut impl Iterator<Item = u8>) {
        let mut next = || input.next().unwrap_or(0);
        // The first words are those that matter most.
        let place = match step & 0x40 {
            0 => usize::from(next()) % 64,
            _ => usize::from(u16::from_le_bytes([next(), next()])) % (CHANNEL_BYTES - 8),
        };
        for byte in 0..=usize::from(step & 7) {
            self.write(place + byte, next());
        }
    }

    /// One step of the supervisor's, none of which may wait.
    fn supervise(&mut self, step: u8) {
        let shared = Arc::clone(self.port.shared());
        let gate = shared.helper_gate();
        match step & 0xf {
            0 | 1 => drop(gate.close(1, || true)),
            2 => gate.open(),
            3 => _ = gate.relieve(),
            4 => {
                if let Some(wanted) = shared.unregister_wanted() {
                    shared.note_unregister_progress();
                    shared.answer_unregister(wanted.number);
                }
            }
            5 => _ = shared.is_forking(),
            6 => shared.bump_event_count(),
            7 => _ = shared.wait_done(self.port.posted(), Duration::ZERO),
            8 => shared.dismiss_helper(step.into()),
            number => {
                let count = usize::from(number) * 9;
                if let Some(outcome) = self.port.outcome(count, count) {
                    assert!(outcome.drops.len() <= RUNS_MAX && outcome.moves.len() <= RUNS_MAX);
                    self.posted = false;
                }
                if !self.posted {
                    self.post(count.min(RUNS_MAX));
                }
            }
        }
    }

    fn post(&mut self, count: usize) {
        let (drops, moves) = (
            [DropRun::default(); RUNS_MAX],
            [MoveRun::default(); RUNS_MAX],
        );
        let events = self.port.shared().event_count();
        self.port.post(events, &drops[..count], &moves[..count]);
        self.posted = true;
    }

    /// An outcome has as many runs as its command, whatever the program wrote.
    fn take_outcome(&mut self) {
        if !std::mem::take(&mut self.posted) {
            return;
        }
        let posted = self.port.posted().to_ne_bytes();
        for (byte, value) in posted.into_iter().enumerate() {
            self.write(offset_of!(Channel, done) + byte, value);
        }
        let outcome = self.port.outcome(3, RUNS_MAX + 1).expect("it is done");
        assert_eq!((outcome.drops.len(), outcome.moves.len()), (3, RUNS_MAX));
    }
}

/// A hello of any bytes. An arena that is believed is one: page-aligned, in a program's half of the
/// addresses, its parts inside it and apart from each other.
pub fn hello(input: &[u8]) {
    let mut words = input.chunks_exact(8).map(|word| {
        let word = word.try_into().expect("eight bytes");
        u64::from_ne_bytes(word)
    });
    let mut hello = Hello::default();
    let fields = [
        &mut hello.magic,
        &mut hello.inherited,
        &mut hello.arena,
        &mut hello.arena_length,
        &mut hello.stage,
        &mut hello.stage_pages,
        &mut hello.trash,
        &mut hello.beacon,
        &mut hello.relative,
        &mut hello.thread,
        &mut hello.refused,
    ];
    for (field, word) in fields.into_iter().zip(&mut words) {
        *field = word;
    }
    let Some(layout) = hello.layout() else {
        return;
    };
    let page = PAGE_SIZE as u64;
    let (arena, stage, trash) = (layout.arena, layout.stage, layout.trash);
    let beacon = (layout.beacon, layout.beacon + page);
    for (start, end) in [arena, stage, trash, beacon] {
        assert!(page <= start && start < end && end <= crate::addresses::END);
        assert!(start % page == 0 && end % page == 0);
    }
    assert!(arena.0 <= stage.0 && stage.1 == trash.0 && trash.1 <= arena.1);
    assert!(beacon.1 <= stage.0 || trash.1 <= beacon.0);
    assert_eq!((stage.1 - stage.0) / page, hello.stage_pages);
}

/// Files of `/proc` of a program that chose its own name, and names of files and mappings.
pub fn proc_files(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    read_anything(&text);
    let named = &input[..input.len().min(LONGEST_NAME)];
    let name: String = String::from_utf8_lossy(named).replace('\0', "");
    let stat = format!("12 ({name}) R 34 12 12 0 -1 64 1 2 3 4 5 6 7 8 20 0 3 0 98765 100 200");
    assert_eq!(process::stat_field(&stat, 3), Some('R'));
    assert_eq!(process::stat_field(&stat, 4), Some(34));
    assert_eq!(process::start_of_living(&stat), Some(98_765));
    // As the kernel escapes it.
    let escaped = name.replace('\\', "\\\\").replace('\n', "\\n");
    let status = format!("Name:\t{escaped}\nTgid:\t12\nNSpid:\t12\t1\nSeccomp_filters:\t5\n");
    assert_eq!(process::named_field(&status, "Tgid"), Some("12"));
    assert_eq!(process::named_field(&status, "NSpid"), Some("12\t1"));
    let mut filters = Filters::default();
    let parts = usize::from(input.first().copied().unwrap_or(0)) + 1;
    status
        .as_bytes()
        .chunks(parts)
        .for_each(|part| filters.look(part));
    assert_eq!(filters.count, 5);
    let escaped = text.replace('\0', "").replace('\n', "\\012");
    let range = "7f0000000000-7f0000001000 rw-p 00000000";
    let file = process::parse_line(&format!("{range} 08:01 1234    /{escaped}"));
    assert!(!file.expect("a mapping").is_movable(), "a file's");
    let named = process::parse_line(&format!("{range} 00:00 0    [anon:{escaped}]"));
    let named = named.expect("a mapping");
    assert!(named.is_movable() && (named.start, named.end) == (0x7f00_0000_0000, 0x7f00_0000_1000));
}

/// The kernel's, without the end.
const LONGEST_NAME: usize = 15;

fn read_anything(text: &str) {
    for line in text.lines() {
        if let Some(area) = process::parse_line(line) {
            assert!(!area.guards(&area));
        }
    }
    for range in process::inherited_ranges(text, process::InheritedBy::Registration) {
        assert!(text.contains("um"), "{range:?} is not registered");
    }
    for name in ["Tgid", "NSpid", "VmRSS", ""] {
        _ = process::named_field(text, name);
        _ = process::named_bytes(text, name);
    }
    for field in 0..60 {
        _ = process::stat_field::<u64>(text, field);
    }
    _ = process::start_of_living(text);
    Filters::default().look(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testing::replay;

    #[test]
    fn a_program_may_write_anything_over_its_channel() {
        replay("channel", channel);
    }

    #[test]
    fn a_hello_may_say_anything() {
        replay("hello", hello);
    }

    #[test]
    fn programs_may_have_any_names() {
        replay("proc_files", proc_files);
    }
}
