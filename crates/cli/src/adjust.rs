//! `memfold limit`, `memfold reclaim`, `memfold detach` and `memfold swapoff`: commands to a run that goes on (`swapoff`
//! also to a disk), and what came of them.

use crate::arguments::{DetachArguments, LimitArguments, ReclaimArguments, SwapOffArguments};
use crate::control::{Answer, Command, Usage, command, instance_of, run_of, run_with};
use crate::describe::print;
use crate::failure::Failure;
use crate::format::{bytes, grouped};
use crate::instance::Instance;
use std::process::ExitCode;

/// Why memory stays.
const WHY: &str = "locked, in use, incompressible, or not managed";

/// `memfold limit PID SIZE [--resident]`: exit status 1 if the limit is not reached, though it holds from now on.
pub fn limit(arguments: &LimitArguments) -> Result<ExitCode, Failure> {
    let (folder, run) = run_of(arguments.pid)?;
    let order = Command::Limit {
        size: arguments.size.text.clone(),
        resident: arguments.resident,
    };
    match command(&folder, run, &order)? {
        Answer::Limit { old, new, usage } => {
            let what = if arguments.resident {
                "resident limit"
            } else {
                "limit"
            };
            print(format!("{}\n", limit_text(what, run, old, new, usage)).as_bytes())?;
            reached(what, run, excess(new, usage, arguments.resident))
        }
        answer => Err(unexpected(&answer)),
    }
}

/// What changing a limit did, as one line.
pub fn limit_text(what: &str, run: u32, old: Option<u64>, new: u64, usage: Usage) -> String {
    let old = old.map_or("none".to_owned(), bytes);
    format!(
        "{what} of run {run}: {old} -> {}; in use: {} -> {}, of which resident: {} -> {}",
        bytes(new),
        bytes(usage.total_before),
        bytes(usage.total_after),
        bytes(usage.resident_before),
        bytes(usage.resident_after),
    )
}

/// Bytes above a new limit that could not be paged out.
pub fn excess(new: u64, usage: Usage, resident: bool) -> u64 {
    let held = if resident {
        usage.resident_after
    } else {
        usage.total_after
    };
    held.saturating_sub(new)
}

fn reached(what: &str, run: u32, excess: u64) -> Result<ExitCode, Failure> {
    if excess == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let text = format!(
        "the {what} of run {run} is in force, but not reached yet: {} could not be paged out for now ({WHY})",
        bytes(excess)
    );
    Err(Failure::with_status(1, text))
}

/// `memfold reclaim PID [SIZE]`: exit status 1 if less than the size could be paged out.
pub fn reclaim(arguments: &ReclaimArguments) -> Result<ExitCode, Failure> {
    let (folder, run) = run_of(arguments.pid)?;
    let order = Command::Reclaim {
        size: arguments.size.as_ref().map(|size| size.text.clone()),
    };
    let Answer::Reclaimed(usage) = command(&folder, run, &order)? else {
        return Err(Failure::own("the run gave another answer than expected"));
    };
    let text = format!(
        "run {}: {} paged out; resident: {} -> {}, in use with the pool: {} -> {}\n",
        run,
        bytes(usage.paged_out),
        bytes(usage.resident_before),
        bytes(usage.resident_after),
        bytes(usage.total_before),
        bytes(usage.total_after),
    );
    print(text.as_bytes())?;
    let asked = arguments.size.as_ref();
    let asked = asked.map_or(0, |size| size.size.bytes_of(usage.resident_before));
    // What the program has given back meanwhile need not go out.
    let gone = usage.resident_before.saturating_sub(usage.resident_after);
    let gone = gone.max(usage.paged_out);
    if gone < asked {
        return Err(Failure::with_status(
            1,
            format!(
                "{} of {} could not be paged out ({WHY})",
                bytes(asked - gone),
                bytes(asked)
            ),
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// `memfold detach PID`.
pub fn detach(arguments: &DetachArguments) -> Result<ExitCode, Failure> {
    let (folder, run) = run_with(arguments.pid)?;
    let pid = arguments.pid.cast_signed();
    match command(&folder, run, &Command::Detach { pid })? {
        Answer::Detached => {
            let text = format!("process {pid} has all its memory back, and runs without memfold\n");
            print(text.as_bytes())
        }
        answer => Err(unexpected(&answer)),
    }
}

/// `memfold swapoff [PID]`.
pub fn swapoff(arguments: &SwapOffArguments) -> Result<ExitCode, Failure> {
    let (folder, instance) = instance_of(arguments.pid)?;
    let pid = instance.pid();
    let (of, unused) = match instance {
        Instance::Run(_) => ("pages of run", "neither a swap file nor a store is used"),
        Instance::Disk(_) => ("blocks of disk", "its swap file is not used"),
    };
    match command(&folder, pid, &Command::SwapOff)? {
        Answer::Pages(count) => {
            let count = grouped(count);
            let text = format!("{count} {of} {pid} are back in memory; {unused} any more\n");
            print(text.as_bytes())
        }
        answer => Err(unexpected(&answer)),
    }
}

fn unexpected(answer: &Answer) -> Failure {
    Failure::own(format!(
        "the run gave another answer than expected: {answer:?}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const USAGE: Usage = Usage {
        resident_before: 100 << 20,
        resident_after: 40 << 20,
        total_before: 110 << 20,
        total_after: 64 << 20,
        paged_out: 61 << 20,
    };

    #[test]
    fn a_change_is_confirmed_with_what_happened() {
        let text = limit_text("limit", 7, Some(128 << 20), 64 << 20, USAGE);
        assert_eq!(
            text,
            "limit of run 7: 128 MiB -> 64.0 MiB; in use: 110 MiB -> 64.0 MiB, of which resident: \
             100 MiB -> 40.0 MiB"
        );
        let text = limit_text("resident limit", 7, None, 32 << 20, USAGE);
        assert!(
            text.starts_with("resident limit of run 7: none -> 32.0 MiB;"),
            "{text}"
        );
    }

    #[test]
    fn a_limit_that_is_not_reached_is_a_failure() {
        let changed = |new, resident| reached("limit", 7, excess(new, USAGE, resident));
        assert!(changed(64 << 20, false).is_ok() && changed(40 << 20, true).is_ok());
        assert!(changed(63 << 20, false).is_err());
        let failure = format!("{:?}", changed(32 << 20, true).unwrap_err());
        assert!(
            failure.contains("8.0 MiB could not") && failure.contains("status: 1"),
            "{failure}"
        );
    }
}
