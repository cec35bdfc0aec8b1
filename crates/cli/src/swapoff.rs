//! `memfold swapoff`: the swap file of a run is given up while its programs run on.
//!
//! The run listens at a second socket in its private folder. It evacuates in a thread of its own,
//! so that signals and questions are answered meanwhile.

use crate::arguments::SwapOffArguments;
use crate::describe::print;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::live::{self, Server};
use crate::stat::nothing_runs;
use memfold_pager::Control;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;

/// The socket's name in the private folder of a run.
pub const SOCKET: &str = "command.sock";
/// What is sent. A connection alone commands nothing.
const COMMAND: &[u8] = b"swapoff\n";

/// What came of it.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// So many pages came back.
    Pages(u64),
    /// Why the file is still in use.
    Refused(String),
}

/// `memfold swapoff [PID]`.
pub fn swapoff(arguments: &SwapOffArguments) -> Result<ExitCode, Failure> {
    let runs = live::runs(live::PATIENCE);
    let mut chosen = runs.into_iter().filter(|(_, snapshot)| {
        let is_meant = |pid| snapshot.pid == pid || snapshot.program_pid == pid;
        arguments.pid.is_none_or(is_meant)
    });
    let (folder, snapshot) = chosen.next().ok_or_else(|| nothing_runs(arguments.pid))?;
    if chosen.next().is_some() {
        return Err(Failure::with_status(
            1,
            "several runs of yours go on; give the process number of one (see memfold stat)",
        ));
    }
    match ask(&folder.join(SOCKET)) {
        Ok(Answer::Pages(pages)) => {
            let text = format!(
                "{} pages of run {} are back in memory, and its swap file is no more used\n",
                grouped(pages),
                snapshot.pid
            );
            print(text.as_bytes())
        }
        Ok(Answer::Refused(reason)) => Err(Failure::with_status(1, reason)),
        Err(error) => Err(Failure::with_status(
            1,
            format!("run {} does not answer: {error}", snapshot.pid),
        )),
    }
}

fn ask(socket: &Path) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    if !live::is_trusted(&stream) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.write_all(COMMAND)?;
    stream.shutdown(Shutdown::Write)?;
    // However long it takes: it comes when all is back, and the end of the file if the run ends.
    Ok(serde_json::from_reader(stream)?)
}

/// Executes the commands of those who ask now; never waits.
pub fn serve(commands: &Server, control: &Control) {
    while let Some(stream) = commands.accept() {
        let control = control.clone();
        let thread = std::thread::Builder::new().name("swapoff".into());
        if let Err(error) = thread.spawn(move || execute(stream, &control)) {
            log::warn!("no thread for a command: {error}");
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
    // Who has left meanwhile is no concern.
    if let Ok(document) = serde_json::to_vec(&answer) {
        let _ = stream.write_all(&document);
    }
}
