//! Commands to a run that goes on (`swapoff`, `limit`, `reclaim`, and `top`'s question for a program's
//! mappings) and to a disk (`swapoff`).
//!
//! It listens at a second socket in its private folder, for its own user and root. A connection
//! carries one command as JSON and gets one answer. Each command has a thread of its own, so that signals
//! and questions are answered meanwhile.

use crate::failure::Failure;
use crate::format::{bytes, printable};
use crate::instance::Instance;
use crate::live::{self, RunFolder, Server, nothing_runs};
use crate::report::total_bytes;
use memfold_pager::{Attacher, Change, Control, Limit, MappingUsage, Size};
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The socket's name in the private folder of a run.
pub const SOCKET: &str = "command.sock";
/// Far more than a command takes.
const LONGEST_COMMAND: u64 = 4096;
/// Commands that may be under way at a time.
const MOST_COMMANDS: usize = 16;
/// Below this a program's own code and stacks do not fit.
pub const LEAST_LIMIT: u64 = 16 << 20;

/// What a run or a disk is told to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum Command {
    /// Bring all pages back from the swap file and the store, or all blocks from the swap file.
    SwapOff,
    /// Change a limit.
    Limit {
        /// As users write it; a percentage is of what the run's host or control group allows.
        size: String,
        /// The limit on resident memory, not that on all.
        resident: bool,
    },
    /// Page out, whatever the limit is.
    Reclaim {
        /// As users write it; a percentage is of what is resident. All that can be without one.
        size: Option<String>,
    },
    /// Bring all of a program back and let it go.
    Detach {
        /// The program's PID, as the run reports it.
        pid: i32,
    },
    /// Tell what each mapping of a program has in memory and outside.
    Mappings {
        /// The program's PID, as the run reports it.
        pid: i32,
    },
}

/// The answer to a command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The number of pages or blocks that came back.
    Pages(u64),
    /// A limit was changed, from one number of bytes to another.
    Limit {
        /// The limit before; none if there was no such limit.
        old: Option<u64>,
        /// The limit now.
        new: u64,
        /// What that did.
        usage: Usage,
    },
    /// Memory was paged out.
    Reclaimed(Usage),
    /// A program was let go.
    Detached,
    /// The mappings of a program, those with the most pages first.
    Mappings(Vec<MappingUsage>),
    /// Why nothing was done.
    Refused(String),
}

/// Bytes in use before and after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Resident before.
    pub resident_before: u64,
    /// Resident afterwards.
    pub resident_after: u64,
    /// Resident, pool and metadata before.
    pub total_before: u64,
    /// Resident, pool and metadata afterwards.
    pub total_after: u64,
    /// Paged out meanwhile; some of it may be back.
    pub paged_out: u64,
}

impl From<Change> for Usage {
    fn from(change: Change) -> Usage {
        Usage {
            resident_before: change.before.resident_bytes,
            resident_after: change.after.resident_bytes,
            total_before: total_bytes(&change.before),
            total_after: total_bytes(&change.after),
            paged_out: change.paged_out,
        }
    }
}

/// The run or disk of this user that a PID means; without one, the only one.
pub fn instance_of(pid: Option<u32>) -> Result<(RunFolder, Instance), Failure> {
    let found = live::instances(live::PATIENCE);
    let mut chosen = found.into_iter().filter(|(folder, instance)| match pid {
        Some(pid) => live::is_meant(folder, instance, pid),
        None => folder.is_own(),
    });
    let one = chosen.next().ok_or_else(|| nothing_runs(pid))?;
    if chosen.next().is_some() {
        return Err(Failure::with_status(
            1,
            "several runs or disks of yours go on; give the PID of one (see memfold stat)",
        ));
    }
    Ok(one)
}

/// The run of this user that a PID means, and its PID.
pub fn run_of(pid: u32) -> Result<(RunFolder, u32), Failure> {
    match instance_of(Some(pid))? {
        (folder, Instance::Run(run)) => Ok((folder, run.pid)),
        (_, Instance::Disk(disk)) => Err(Failure::with_status(
            1,
            format!(
                "PID {} serves a disk, whose limit is set when it starts (memfold serve --limit); only \
                 swapoff, stat and top know disks",
                disk.pid
            ),
        )),
    }
}

/// The run of this user that has a program with that PID.
pub fn run_with(program: u32) -> Result<(RunFolder, u32), Failure> {
    let found = live::instances(live::PATIENCE);
    let itself = found.iter().find_map(|(folder, instance)| match instance {
        Instance::Run(run) if folder.is_own() && run.pid == program => Some(run.program_pid),
        _ => None,
    });
    if let Some(its) = itself {
        return Err(Failure::with_status(
            1,
            format!(
                "PID {program} is memfold itself; its program is PID {its}: memfold detach {its}"
            ),
        ));
    }
    let run = found
        .into_iter()
        .find_map(|(folder, instance)| match instance {
            // What another user's run says of its programs is not believed.
            Instance::Run(run) if folder.is_own() => {
                let pids = run.programs.iter().map(|one| one.pid.cast_unsigned());
                let has = pids.chain([run.program_pid]).any(|pid| pid == program);
                has.then_some((folder, run.pid))
            }
            _ => None,
        });
    run.ok_or_else(|| {
        let text = format!(
            "no run of yours has a program with the PID {program}; memfold top shows them (key p)"
        );
        Failure::with_status(1, text)
    })
}

/// Has a run or disk execute a command, however long that takes.
pub fn command(folder: &RunFolder, pid: u32, command: &Command) -> Result<Answer, Failure> {
    match ask(folder, command, None) {
        Ok(Answer::Refused(reason)) => Err(Failure::with_status(1, reason)),
        Ok(answer) => Ok(answer),
        Err(error) => Err(Failure::with_status(
            1,
            format!("PID {pid} did not answer: {error}; has it just ended? (see memfold stat)"),
        )),
    }
}

/// The mappings of a program of a run, or why there are none.
#[cfg(feature = "top")]
pub fn mappings(
    folder: &RunFolder,
    pid: i32,
    patience: std::time::Duration,
) -> Result<Vec<MappingUsage>, String> {
    let deadline = Instant::now() + patience;
    match ask(folder, &Command::Mappings { pid }, Some(deadline)) {
        Ok(Answer::Mappings(found)) => Ok(found),
        Ok(Answer::Refused(reason)) => Err(printable(&reason)),
        Ok(_) => Err("it gave another answer than expected".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Without a deadline the answer is waited for until the run ends.
fn ask(folder: &RunFolder, command: &Command, deadline: Option<Instant>) -> io::Result<Answer> {
    let connected_by = deadline.unwrap_or_else(|| Instant::now() + live::PATIENCE);
    let (mut stream, _) = folder.connect(SOCKET, connected_by)?;
    stream.write_all(&serde_json::to_vec(command)?)?;
    stream.shutdown(Shutdown::Write)?;
    // The answer comes when all is done, and the end of the file if the run ends.
    let answer = live::read_all(stream, deadline)?;
    if answer.is_empty() {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&answer)?)
}

/// What executes a command.
pub type Executor = Box<dyn FnOnce(&Command) -> Result<Answer, String> + Send>;

/// Commands under way.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);

/// Executes the commands that have arrived; never waits.
pub fn serve(commands: &Server, executor: impl Fn() -> Executor) {
    while let Some(stream) = commands.accept() {
        if UNDER_WAY.fetch_add(1, Ordering::Relaxed) >= MOST_COMMANDS {
            UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
            answer(stream, &Answer::Refused(TOO_MANY.to_owned()));
            continue;
        }
        let executor = executor();
        let thread = std::thread::Builder::new().name("command".into());
        let started = thread.spawn(move || {
            execute(stream, executor);
            UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
        });
        if let Err(error) = started {
            UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
            log::warn!("cannot start a thread for a command: {error}");
        }
    }
}

/// Waits, for a moment, until the answers to all commands are sent: what executed the last one may be about to.
pub fn finish() {
    let deadline = Instant::now() + live::PATIENCE;
    while UNDER_WAY.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

const TOO_MANY: &str = "too many commands are under way; try again later";

fn execute(stream: UnixStream, executor: Executor) {
    let received = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(live::PATIENCE)))
        .and_then(|()| receive(&stream));
    let Ok(text) = received else { return };
    let done = match serde_json::from_slice(&text) {
        Ok(command) => executor(&command),
        Err(_) => Err("it does not know that command; is it of another version?".to_owned()),
    };
    answer(stream, &done.unwrap_or_else(Answer::Refused));
}

fn receive(stream: &UnixStream) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    stream.take(LONGEST_COMMAND).read_to_end(&mut text)?;
    Ok(text)
}

fn answer(mut stream: UnixStream, answer: &Answer) {
    // The client may have left meanwhile.
    if let Ok(document) = serde_json::to_vec(answer) {
        let _ = stream.write_all(&document);
    }
}

/// Executes a command on a run.
pub fn of_run(control: Control, attacher: Attacher) -> Executor {
    Box::new(move |command| perform(command, &control, &attacher))
}

fn perform(command: &Command, control: &Control, attacher: &Attacher) -> Result<Answer, String> {
    match command {
        Command::SwapOff => {
            let pages = control.swap_off().map_err(|error| error.to_string())?;
            Ok(Answer::Pages(pages))
        }
        Command::Limit { size, resident } => {
            let new = limit_bytes(size)?;
            let before = control.limit();
            let (old, limit) = changed(before, new, *resident);
            let usage = control.set_limit(limit).into();
            Ok(Answer::Limit { old, new, usage })
        }
        Command::Reclaim { size } => {
            let bytes = size.as_deref().map(|size| reclaim_bytes(size, control));
            let change = control.reclaim(bytes.transpose()?);
            Ok(Answer::Reclaimed(change.into()))
        }
        Command::Detach { pid } => match attacher.detach(*pid) {
            Ok(()) => Ok(Answer::Detached),
            Err(error) => Err(error.to_string()),
        },
        Command::Mappings { pid } => {
            let found = control.mappings(*pid).map_err(|error| error.to_string())?;
            Ok(Answer::Mappings(found))
        }
    }
}

/// The limit that is replaced, and both limits afterwards.
fn changed(before: Limit, new: u64, resident: bool) -> (Option<u64>, Limit) {
    let mut limit = before;
    let place = if resident {
        &mut limit.resident_bytes
    } else {
        &mut limit.total_bytes
    };
    let old = place.replace(new);
    (old, limit)
}

fn size_of(text: &str) -> Result<Size, String> {
    text.parse::<Size>()
        .map_err(|error| format!("{text}: {error}"))
}

fn limit_bytes(text: &str) -> Result<u64, String> {
    let found = size_of(text)?.bytes();
    let found = found.map_err(|error| format!("cannot read what the host allows: {error}"))?;
    if found < LEAST_LIMIT {
        return Err(format!(
            "{} is too little; give at least {}",
            bytes(found),
            bytes(LEAST_LIMIT)
        ));
    }
    Ok(found)
}

fn reclaim_bytes(text: &str, control: &Control) -> Result<u64, String> {
    Ok(size_of(text)?.bytes_of(control.resident_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_survive_the_wire_and_nothing_else_is_one() {
        for command in [
            Command::SwapOff,
            Command::Limit {
                size: "2G".into(),
                resident: true,
            },
            Command::Reclaim { size: None },
        ] {
            let text = serde_json::to_vec(&command).unwrap();
            assert_eq!(serde_json::from_slice::<Command>(&text).unwrap(), command);
        }
        for text in [
            "",
            "swapoff\n",
            "{\"limit\":{\"size\":7,\"resident\":true}}",
            "{\"limit\":{\"size\":\"1G\",\"resident\":true,\"more\":1}}",
            "{\"exec\":\"sh\"}",
        ] {
            assert!(serde_json::from_str::<Command>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_checked_by_the_run() {
        assert_eq!(limit_bytes("64M"), Ok(64 << 20));
        for text in ["", "1M", "0", "lots", "101%", "-5G"] {
            assert!(limit_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn one_limit_changes_and_the_other_stays() {
        let before = Limit {
            total_bytes: Some(1),
            resident_bytes: None,
        };
        let (old, limit) = changed(before, 7, true);
        assert_eq!((old, limit.total_bytes), (None, Some(1)));
        assert_eq!(limit.resident_bytes, Some(7));
        assert_eq!(changed(before, 7, false).0, Some(1));
    }
}
