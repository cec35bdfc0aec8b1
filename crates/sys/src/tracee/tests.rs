use super::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Ends a program with the test.
pub(super) struct Started(pub Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(super) fn start(program: &str, arguments: &[&str]) -> (Started, Arc<Process>) {
    let child = Command::new(program).args(arguments).spawn().unwrap();
    let process = Arc::new(Process::open(child.id() as i32).unwrap());
    (Started(child), process)
}

fn stop(process: &Arc<Process>, thread: i32) -> io::Result<Tracee> {
    Seized::new(process, thread)?.stop(Duration::from_secs(5))
}

/// Stops a program that sleeps for a second, until it has slept or 20 times. Returns how often.
fn stop_sleeping() -> u32 {
    let began = Instant::now();
    let (mut child, process) = start("/bin/sleep", &["1"]);
    let mut stops = 0;
    while stops < 20 {
        let pid = process.pid();
        let mut tracee = match stop(&process, pid) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => break,
            stopped => stopped.unwrap(),
        };
        stops += 1;
        let getpid = libc::SYS_getpid as usize;
        assert_eq!(tracee.call(getpid, [0; 6]).unwrap(), pid as u64);
        let close = libc::SYS_close as usize;
        let error = tracee.call(close, [999, 0, 0, 0, 0, 0]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        drop(tracee);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(child.0.wait().unwrap().success(), "its sleep was spoilt");
    assert!(began.elapsed() >= Duration::from_secs(1));
    stops
}

#[test]
fn a_sleeping_program_makes_calls_and_sleeps_on() {
    // What has been stopped before sleeps in another system call. Without a CPU for long, none is stopped twice.
    let is_enough = (0..10).any(|_| stop_sleeping() > 2);
    assert!(is_enough, "it is hardly stopped within a second");
}

#[test]
fn memory_that_it_mapped_can_be_written_and_read() {
    let (_child, process) = start("/bin/sleep", &["10"]);
    let mut tracee = stop(&process, process.pid()).unwrap();
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let arguments = [0, 4096, 3, flags, u64::MAX, 0];
    let address = tracee.call(libc::SYS_mmap as usize, arguments).unwrap();
    tracee.write(address, b"text").unwrap();
    let mut found = [0; 4];
    tracee.read(address, &mut found).unwrap();
    assert_eq!(&found, b"text");
    assert!(tracee.write(8, b"text").is_err());
}

/// As one that was sent into a library whose code the program has changed.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_thread_that_nothing_interrupts_is_not_waited_for() {
    // vfork; the child: pause, again and again.
    const CODE: [u8; 20] = [
        0xb8, 58, 0, 0, 0, 0x0f, 0x05, 0x85, 0xc0, 0x75, 0x09, 0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb,
        0xf7,
    ];
    let (mut child, process) = start("/bin/sleep", &["100"]);
    let mut tracee = stop(&process, process.pid()).unwrap();
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let arguments = [0, 8192, 7, flags, u64::MAX, 0];
    let code = tracee.call(libc::SYS_mmap as usize, arguments).unwrap();
    tracee.write(code, &CODE).unwrap();
    let began = Instant::now();
    let forked = loop {
        let ran = tracee.run((code, 0), code + 8192, Duration::from_millis(200));
        let error = ran.unwrap_err();
        // Without a CPU it has no child yet, or has not stopped after the last time.
        let has_not_stopped = error.raw_os_error() == Some(libc::ESRCH);
        let is_in_time = began.elapsed() < Duration::from_secs(30);
        assert!(
            error.kind() == io::ErrorKind::TimedOut || has_not_stopped,
            "{error}"
        );
        match process.children()[..] {
            [forked] => break forked,
            [] => assert!(is_in_time, "it has one child: {error}"),
            _ => panic!("it has one child"),
        }
    };
    let forked = Process::open(forked).unwrap();
    let began = Instant::now();
    drop(tracee);
    forked.signal(libc::SIGKILL).unwrap();
    assert!(
        began.elapsed() < 4 * AFTER_CALL_OF_ITS_OWN,
        "{:?}",
        began.elapsed()
    );
    assert!(!child.0.wait().unwrap().success());
}

#[test]
fn a_program_that_ended_is_not_stopped() {
    let (mut child, process) = start("/bin/true", &[]);
    child.0.wait().unwrap();
    let stopped = stop(&process, process.pid());
    assert_eq!(stopped.unwrap_err().raw_os_error(), Some(libc::ESRCH));
}

#[test]
fn only_the_kernels_own_mapping_is_the_vdso() {
    let vdso = |line| MapsLine::parse(line).and_then(super::vdso);
    let own = "7ffd0000-7ffd2000 r-xp 00000000 00:00 0                          [vdso]";
    assert_eq!(vdso(own), Some((0x7ffd_0000, 0x7ffd_2000)));
    for other in [
        "7ffd0000-7ffd2000 r-xp 00000000 fe:00 7                  /tmp/[vdso]",
        "7ffd0000-7ffd2000 r-xp 00000000 fe:00 7                  [vdso]",
        "7ffd0000-7ffd2000 r--p 00000000 00:00 0                  [vvar]",
        "7ffd0000-7ffd2000 r-xp 00000000 00:00 0                  [vdso] (deleted)",
        "",
    ] {
        assert_eq!(vdso(other), None);
    }
}

/// One that is sent while the thread is stopped, and others as it is stopped again and again.
#[test]
fn no_signal_is_lost() {
    let script = "n=0; trap 'n=$((n+1)); echo $n' USR1; echo 0; while :; do sleep 0.01; done";
    let mut child = Command::new("/bin/sh")
        .args(["-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let process = Arc::new(Process::open(child.id() as i32).unwrap());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "0");
    let child = Started(child);
    for sent in 1..=50 {
        process.signal(libc::SIGUSR1).unwrap();
        let pid = process.pid();
        drop(stop(&process, pid).unwrap());
        assert_eq!(lines.next().unwrap().unwrap(), sent.to_string());
    }
    drop(child);
}

#[test]
fn a_program_that_is_stopped_stays_so() {
    let (_child, process) = start("/bin/sleep", &["10"]);
    process.signal(libc::SIGSTOP).unwrap();
    let state = || process.text("stat").unwrap();
    let stands_still = || state().rsplit_once(") ").unwrap().1.starts_with('T');
    let waits = |is_over: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !is_over() {
            assert!(began.elapsed() < Duration::from_secs(10), "{}", state());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    waits(&stands_still);
    let mut tracee = stop(&process, process.pid()).unwrap();
    let getpid = libc::SYS_getpid as usize;
    assert_eq!(tracee.call(getpid, [0; 6]).unwrap(), process.pid() as u64);
    drop(tracee);
    waits(&stands_still);
    process.signal(libc::SIGCONT).unwrap();
    waits(&|| !stands_still());
}

#[test]
fn a_killed_program_is_noticed() {
    let (child, process) = start("/bin/sleep", &["10"]);
    let mut tracee = stop(&process, process.pid()).unwrap();
    process.signal(libc::SIGKILL).unwrap();
    let error = tracee.call(libc::SYS_getpid as usize, [0; 6]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    drop((tracee, child));
}

/// Says that this process is one to be traced, and which program it executes.
const TRACED: &str = "MEMFOLD_TEST_TRACED";

/// A process of several threads, one of which executes a program when a byte comes.
pub(super) fn start_threads(program: &Path) -> (Started, Arc<Process>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "tracee::tests::threads_to_be_traced"]);
    let child = command.env(TRACED, program).stdin(Stdio::piped());
    let child = child.stdout(Stdio::null()).spawn();
    let child = Started(child.unwrap());
    let process = Arc::new(Process::open(child.0.id() as i32).unwrap());
    (child, process)
}

#[test]
fn threads_to_be_traced() {
    let Some(program) = std::env::var_os(TRACED) else {
        return;
    };
    let execute = move || -> io::Error {
        std::io::stdin().read_exact(&mut [0]).unwrap();
        Command::new(program).arg("100").exec()
    };
    let other = std::thread::Builder::new().name("other".into());
    panic!("{}", other.spawn(execute).unwrap().join().unwrap());
}

pub(super) fn wait_until(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The thread of a process that has a name.
pub(super) fn thread_named(process: &Process, name: &str) -> Option<i32> {
    let has_name = |thread: &i32| {
        let found = process.text(&format!("task/{thread}/comm"));
        found.is_ok_and(|found| found.trim_end() == name)
    };
    process.threads().into_iter().find(has_name)
}

/// As code may that the program has changed: executes another one.
pub(super) fn execute(tracee: &mut Tracee, program: &Path) -> io::Error {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let arguments = [0, 4096, 3, flags, u64::MAX, 0];
    let path = tracee.call(libc::SYS_mmap as usize, arguments).unwrap();
    let (time, words) = (path + 1024, path + 2048);
    let program = program.as_os_str().as_bytes();
    tracee.write(path, &[program, b"\0"].concat()).unwrap();
    tracee.write(time, b"0.1\0").unwrap();
    for (at, word) in [path, time, 0].into_iter().enumerate() {
        let bytes = word.to_ne_bytes();
        tracee.write(words + 8 * at as u64, &bytes).unwrap();
    }
    let arguments = [path, words, 0, 0, 0, 0];
    let executed = tracee.call(libc::SYS_execve as usize, arguments);
    executed.unwrap_err()
}

#[test]
fn a_thread_that_executed_a_program_gets_no_registers() {
    let (mut child, process) = start("/bin/sleep", &["100"]);
    let mut tracee = stop(&process, process.pid()).unwrap();
    let error = execute(&mut tracee, Path::new("/bin/sleep"));
    assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    let called = tracee.call(libc::SYS_getpid as usize, [0; 6]);
    assert_eq!(called.unwrap_err().raw_os_error(), Some(libc::ESRCH));
    drop(tracee);
    assert!(child.0.wait().unwrap().success());
}

/// It becomes the main thread, with that one's number.
#[test]
fn another_thread_than_the_main_one_that_executed_a_program_gets_none_either() {
    let (mut child, process) = start_threads(Path::new("/bin/sleep"));
    wait_until(|| thread_named(&process, "other").is_some());
    let other = thread_named(&process, "other").unwrap();
    let mut tracee = stop(&process, other).unwrap();
    let error = execute(&mut tracee, Path::new("/bin/sleep"));
    assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    drop(tracee);
    assert!(child.0.wait().unwrap().success());
}

#[test]
fn a_thread_that_another_one_replaced_is_not_waited_for() {
    let (mut child, process) = start_threads(Path::new("/bin/sleep"));
    wait_until(|| thread_named(&process, "other").is_some());
    let tracee = stop(&process, process.pid()).unwrap();
    child.0.stdin.take().unwrap().write_all(b"!").unwrap();
    wait_until(|| thread_named(&process, "sleep").is_some());
    let began = Instant::now();
    drop(tracee);
    assert!(began.elapsed() < Duration::from_secs(30));
    wait_until(|| process.state(process.pid()) == Some('S'));
}

#[test]
fn a_program_that_was_executed_before_the_stop_goes_on_as_it_was() {
    let mut child = Command::new("/bin/sh")
        .args(["-c", "read line; exec head -c 1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let process = Arc::new(Process::open(child.id() as i32).unwrap());
    let mut input = child.stdin.take().unwrap();
    let mut child = Started(child);
    wait_until(|| thread_named(&process, "sh").is_some());
    let seized = Seized::new(&process, process.pid()).unwrap();
    input.write_all(b"!\n").unwrap();
    wait_until(|| thread_named(&process, "head").is_some());
    let mut tracee = seized.stop(Duration::from_secs(5)).unwrap();
    let getpid = libc::SYS_getpid as usize;
    assert_eq!(tracee.call(getpid, [0; 6]).unwrap(), process.pid() as u64);
    drop(tracee);
    input.write_all(b"!").unwrap();
    assert!(child.0.wait().unwrap().success());
}
