//! Programs that are killed while another starts, as in the published test of August 2024.

use std::{
    process::{Command, Stdio},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    Data, Figures, WORKLOAD, WRONG_RESULT, Wrong,
    area::{Area, Pages},
    pages,
    workers::{Worker, evict, gone_after, start_workers},
};
use crate::Options;

/// Kills `--processes` programs of `--megabytes` each, all swapped out, and at the same time starts
/// the newcomer, which fills and verifies half as much as one of them.
pub fn run(options: &Options) -> Result<Figures> {
    let mut workers = start_workers(options)?;
    let out = evict(&mut workers, options)?;
    let megabytes = (options.number("megabytes", 64)? / 2).max(1).to_string();
    let mut processes: Vec<_> = workers.into_iter().map(Worker::into_process).collect();
    let started = Instant::now();
    for process in &mut processes {
        process.kill()?;
    }
    let waiters: Vec<_> = processes
        .into_iter()
        .map(|process| thread::spawn(move || gone_after(process, started)))
        .collect();
    let mut newcomer = Command::new(std::env::current_exe()?);
    newcomer.args([WORKLOAD, "newcomer", "--megabytes", &megabytes]);
    if options.value("spoil").is_some() {
        newcomer.args(["--spoil", "1"]);
    }
    let status = newcomer
        .stdout(Stdio::null())
        .status()
        .context("cannot start the newcomer")?;
    let newcomer_ms = started.elapsed().as_secs_f64() * 1e3;
    if status.code() == Some(WRONG_RESULT) {
        bail!(Wrong("see the newcomer's error above".to_owned()));
    }
    ensure!(status.success(), "the newcomer exited with {status}");
    let mut gone_ms = 0.0_f64;
    for waiter in waiters {
        let gone = waiter
            .join()
            .map_err(|_| anyhow::anyhow!("a waiter panicked"))??;
        gone_ms = gone_ms.max(gone.as_secs_f64() * 1e3);
    }
    Ok(Figures::default()
        .with("newcomer_ms", newcomer_ms)
        .with("gone_ms", gone_ms)
        .with("fraction_out", out))
}

/// The newcomer's process.
pub fn newcomer(options: &Options) -> Result<Figures> {
    let mut data = Data::new("recorded")?;
    let mut area = Area::new(pages(options)?)?;
    area.write_all(&data);
    if options.value("spoil").is_some() {
        area.spoil();
    }
    area.check_all(&mut data)?;
    Ok(Figures::default())
}
