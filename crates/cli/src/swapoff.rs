//! `memfold swapoff`: takes a run's swap file out of use while its programs run on.
//!
//! The run listens at a second socket in its private folder. It evacuates in a thread of its own,
//! so that signals and questions are answered meanwhile.

use crate::arguments::SwapOffArguments;
use crate::describe::print;
use crate::failure::Failure;
use crate::format::{grouped, printable};
use crate::live::{self, RunFolder, Server};
use crate::stat::nothing_runs;
use memfold_pager::Control;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Instant;

/// The socket's name in the private folder of a run.
pub const SOCKET: &str = "command.sock";
/// What is sent. A connection alone commands nothing.
const COMMAND: &[u8] = b"swapoff\n";

/// The answer to a command.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// The number of pages that came back.
    Pages(u64),
    /// Why the file is still in use.
    Refused(String),
}

/// `memfold swapoff [PID]`.
pub fn swapoff(arguments: &SwapOffArguments) -> Result<ExitCode, Failure> {
    let runs = live::runs(live::PATIENCE);
    let mut chosen = runs
        .into_iter()
        .filter(|(folder, snapshot)| match arguments.pid {
            Some(pid) => live::is_meant(folder, snapshot, pid),
            None => folder.is_own(),
        });
    let (folder, snapshot) = chosen.next().ok_or_else(|| nothing_runs(arguments.pid))?;
    if chosen.next().is_some() {
        return Err(Failure::with_status(
            1,
            "several runs of yours go on; give the PID of one (see memfold stat)",
        ));
    }
    match ask(&folder) {
        Ok(Answer::Pages(pages)) => {
            let text = format!(
                "{} pages of run {} are back in memory, and its swap file is no longer used\n",
                grouped(pages),
                snapshot.pid
            );
            print(text.as_bytes())
        }
        Ok(Answer::Refused(reason)) => Err(Failure::with_status(1, printable(&reason))),
        Err(error) => Err(Failure::with_status(
            1,
            format!("run {} does not answer swapoff: {error}", snapshot.pid),
        )),
    }
}

fn ask(folder: &RunFolder) -> io::Result<Answer> {
    let (mut stream, _) = folder.connect(SOCKET, Instant::now() + live::PATIENCE)?;
    stream.write_all(COMMAND)?;
    stream.shutdown(Shutdown::Write)?;
    // However long it takes: it comes when all is back, and the end of the file if the run ends.
    Ok(serde_json::from_slice(&live::read_all(stream, None)?)?)
}

/// Executes the commands that have arrived; never waits.
pub fn serve(commands: &Server, control: &Control) {
    while let Some(stream) = commands.accept() {
        let control = control.clone();
        let thread = std::thread::Builder::new().name("swapoff".into());
        if let Err(error) = thread.spawn(move || execute(stream, &control)) {
            log::warn!("cannot start a thread for swapoff: {error}");
        }
    }
}

fn execute(mut stream: UnixStream, control: &Control) {
    let mut command = [0; COMMAND.len()];
    let asked = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(live::PATIENCE)))
        .and_then(|()| stream.read_exact(&mut command));
    if asked.is_err() || command != COMMAND {
        return;
    }
    let answer = match control.swap_off() {
        Ok(pages) => Answer::Pages(pages),
        Err(error) => Answer::Refused(error.to_string()),
    };
    // The client may have left meanwhile.
    if let Ok(document) = serde_json::to_vec(&answer) {
        let _ = stream.write_all(&document);
    }
}
