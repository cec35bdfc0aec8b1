//! The tests' own instruments: programs that verify memory must notice a wrong byte,
//! and the sampler must see memory.

use crate::support::{
    Heartbeat, Limits, MIB, Program, Sample, Verdict, compiled, descendants, judge,
    wait_until_stopped,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Start of the largest private anonymous mapping of a process, and its length.
fn largest_mapping(process: i32) -> (u64, u64) {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).expect("its mappings");
    maps.lines()
        .filter(|line| line.contains(" rw-p ") && line.split_whitespace().count() == 5)
        .filter_map(|line| {
            let (start, end) = line.split(' ').next()?.split_once('-')?;
            let start = u64::from_str_radix(start, 16).ok()?;
            Some((start, u64::from_str_radix(end, 16).ok()? - start))
        })
        .max_by_key(|&(_, length)| length)
        .expect("an anonymous mapping")
}

#[test]
fn a_verifying_program_notices_one_wrong_byte() {
    beside!(&["cc"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let result = folder.path().join("result");
    let program = Program::new(compiled("verify", &["verify.c"], &[]))
        .args(["8", "0"])
        .arg(&result);
    let mut running = program.start(Limits::None);
    running.wait_for_output(1);
    let (start, length) = largest_mapping(running.root());
    assert!(length >= 8 * MIB);
    let mut memory = OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/{}/mem", running.root()))
        .expect("its memory");
    // It ends at the first wrong byte that it finds.
    let stopped = Pid::from_raw(running.root());
    kill(stopped, Signal::SIGSTOP).expect("it is stopped");
    wait_until_stopped(running.root());
    // A few bytes, because a page may just be about to be rewritten.
    for page in [100, 700, 1300, 1900] {
        let mut byte = [0];
        let place = SeekFrom::Start(start + page * 4096 + 1234);
        memory.seek(place).expect("seek");
        memory.read_exact(&mut byte).expect("read");
        memory.seek(place).expect("seek");
        memory.write_all(&[byte[0] ^ 0x10]).expect("write");
    }
    kill(stopped, Signal::SIGCONT).expect("it goes on");
    let outcome = running.wait();
    assert_eq!(outcome.code(), 1, "{}", outcome.text());
    assert!(outcome.text().contains("MISMATCH"), "{}", outcome.text());
    assert_eq!(
        fs::read_to_string(&result).expect("the result file"),
        "MISMATCH\n"
    );
}

#[test]
fn the_sampler_sees_the_memory_of_a_tree_once() {
    beside!(&["cc"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let verify = compiled("verify", &["verify.c"], &[]);
    let outcome = Program::new(verify)
        .args(["64", "30"])
        .arg(folder.path().join("result"))
        .run(Limits::None);
    outcome.assert_success();
    let seen = outcome.peak().total;
    assert!((64 * MIB..70 * MIB).contains(&seen), "{seen} of 64 MiB");
    // Forks that share memory: far less than processes times memory.
    let outcome = Program::new(compiled("forktree", &["forktree.c"], &[]))
        .arg("40")
        .run(Limits::None);
    outcome.assert_success();
    let seen = outcome.peak().total;
    assert!(
        (40 * MIB..40 * 8 * MIB).contains(&seen),
        "{seen} in a tree that shares 40 MiB"
    );
}

#[test]
fn a_tree_is_found_whole_and_nothing_else() {
    beside!(&["sh", "sleep"]);
    let mut shell = Command::new("sh")
        .args(["-c", "sleep 60 & (sleep 60 & echo; wait) & wait"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("a shell");
    let root = shell.id().cast_signed();
    let mut line = [0];
    let output = shell.stdout.as_mut().expect("its output");
    output.read_exact(&mut line).expect("its line");
    let deadline = Instant::now() + Duration::from_secs(10);
    // The shell, its two children, and the child of one of them.
    while descendants(root).len() != 4 {
        assert!(Instant::now() < deadline, "{:?}", descendants(root));
        thread::sleep(Duration::from_millis(5));
    }
    let found = descendants(root);
    assert!(found.contains(&root) && !found.contains(&std::process::id().cast_signed()));
    for process in &found {
        kill(Pid::from_raw(*process), Signal::SIGKILL).expect("it is there");
    }
    shell.wait().expect("its end");
    assert!(descendants(root).is_empty());
}

/// What the largest of some samples that hold `mebibytes` MiB is judged to be, under a limit of 16 MiB.
fn verdict(mebibytes: &[u64], pause: Duration) -> Verdict {
    let samples: Vec<Sample> = mebibytes
        .iter()
        .map(|size| Sample {
            total: size * MIB,
            ..Sample::default()
        })
        .collect();
    judge(&samples, |sample| sample.total, 16 * MIB, 24 * MIB, pause)
}

#[test]
fn a_pause_excuses_no_more_than_the_limit_once_again() {
    let ms = Duration::from_millis;
    assert!(matches!(verdict(&[16, 24], ms(0)), Verdict::Held));
    let peak = [16, 40];
    assert!(matches!(verdict(&peak, ms(2)), Verdict::Outgrown { .. }));
    assert!(matches!(verdict(&peak, ms(5)), Verdict::Excused { over } if over == 16 * MIB));
    // However long the pause was.
    for pause in [ms(50), ms(50_000)] {
        assert!(matches!(verdict(&[41], pause), Verdict::Outgrown { .. }));
        assert!(matches!(
            verdict(&[41; 21], pause),
            Verdict::Outgrown { .. }
        ));
    }
    // For long, only where the pause was long.
    let long = [30; 21];
    assert!(matches!(
        verdict(&long, ms(10)),
        Verdict::Outgrown { samples: 21, .. }
    ));
    assert!(matches!(verdict(&long, ms(20)), Verdict::Excused { .. }));
}

#[test]
fn the_heartbeat_sees_that_no_thread_may_run() {
    const HELD_UP: Duration = Duration::from_millis(60);
    beside!(&[]);
    // The kernel lets ordinary threads run for a twentieth of a second of each, whatever takes the CPUs.
    let mut pauses = (0..5).map(|_| seen_while_held_up(HELD_UP));
    assert!(pauses.any(|pause| pause > HELD_UP / 2));
}

/// What the heartbeat sees while all CPUs are taken.
fn seen_while_held_up(time: Duration) -> Duration {
    let heartbeat = Heartbeat::start();
    let cpus = thread::available_parallelism().expect("there are CPUs");
    let hogs: Vec<_> = (0..cpus.get())
        .map(|_| thread::spawn(move || hog(time)))
        .collect();
    for hog in hogs {
        hog.join().expect("it ends");
    }
    heartbeat.finish()
}

/// Takes a CPU for itself.
fn hog(time: Duration) {
    let priority = nix::libc::sched_param { sched_priority: 1 };
    // SAFETY: the call reads the structure, and changes this thread alone, which soon ends.
    let result =
        unsafe { nix::libc::sched_setscheduler(0, nix::libc::SCHED_FIFO, &raw const priority) };
    assert_eq!(result, 0, "root may take a CPU for itself");
    let until = Instant::now() + time;
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}
