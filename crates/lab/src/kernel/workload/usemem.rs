//! A reimplementation of usemem (vm-scalability) with the options of the published tests,
//! `usemem --init-time -O -y -x -n N SIZE`:
//!
//! - `-n N SIZE`: N processes with SIZE bytes each;
//! - `-O`: in an anonymous mapping;
//! - `--init-time`: the first write is timed;
//! - `-y`: all processes start using it at the same time;
//! - `-x`: all processes free it at the same time.

use std::{io::stdin, time::Instant};

use anyhow::{Result, bail};
use zsmalloc::PAGE_SIZE;

use super::{
    Figures, Wrong,
    area::{Area, Pages},
    or_wrong, pages, report,
    workers::Worker,
};
use crate::Options;

/// Runs the processes. Returns the sum of their throughputs and the mean time to free.
pub fn run(options: &Options) -> Result<Figures> {
    let mut arguments = vec![
        "--megabytes".to_owned(),
        options.number("megabytes", 64)?.to_string(),
    ];
    if let Some(spoil) = options.value("spoil") {
        arguments.extend(["--spoil".to_owned(), spoil.to_owned()]);
    }
    let count = options.number("processes", 4)?;
    let started = Instant::now();
    let mut processes = (0..count)
        .map(|_| Worker::start("usemem-process", &arguments))
        .collect::<Result<Vec<_>>>()?;
    let (mut throughput, mut free) = (0.0, 0.0);
    for order in ["use", "free"] {
        for process in &mut processes {
            process.send(order)?;
        }
        for process in &mut processes {
            let figures = process.receive()?;
            throughput += figures.get("throughput_mib_per_s").unwrap_or(0.0);
            free += figures.get("free_ms").unwrap_or(0.0) / count as f64;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    for process in processes {
        process.stop()?;
    }
    Ok(Figures::default()
        .with("seconds", seconds)
        .with("throughput_mib_per_s", throughput)
        .with("free_ms", free))
}

/// One process: writes every word, then reads and verifies every word.
pub fn process(options: &Options) -> Result<()> {
    report(&Figures::default())?;
    let mut area = None;
    for line in stdin().lines() {
        match line?.as_str() {
            "use" => {
                let started = Instant::now();
                let mut memory = Area::new(pages(options)?)?;
                for number in 0..memory.pages() {
                    for (index, word) in memory.page(number).chunks_exact_mut(8).enumerate() {
                        word.copy_from_slice(&word_at(number, index));
                    }
                }
                if options.value("spoil").is_some() {
                    memory.spoil();
                }
                or_wrong(read(&mut memory))?;
                let mebibytes = memory.mebibytes();
                let throughput = 2.0 * mebibytes / started.elapsed().as_secs_f64();
                report(&Figures::default().with("throughput_mib_per_s", throughput))?;
                area = Some(memory);
            }
            "free" => {
                let started = Instant::now();
                area = None;
                let free_ms = started.elapsed().as_secs_f64() * 1e3;
                report(&Figures::default().with("free_ms", free_ms))?;
            }
            other => bail!("usemem: unknown order {other:?}"),
        }
    }
    drop(area);
    Ok(())
}

fn read(memory: &mut Area) -> Result<()> {
    for number in 0..memory.pages() {
        let words = memory.page(number).chunks_exact(8).enumerate();
        for (index, word) in words {
            if word != word_at(number, index) {
                bail!(Wrong(format!(
                    "word {index} of page {number} differs from what was written"
                )));
            }
        }
    }
    Ok(())
}

/// The value of a word: its offset.
fn word_at(page: usize, index: usize) -> [u8; 8] {
    ((page * PAGE_SIZE + index * 8) as u64).to_le_bytes()
}
