//! Single-process workloads that fill memory: page-out and memhog.

use std::time::Instant;

use anyhow::{Result, bail};
use zsmalloc::PAGE_SIZE;

use super::{
    Data, Figures, Wrong,
    area::{Area, Pages},
    latency::Latencies,
    pages,
};
use crate::Options;

/// Writes more memory than the limit allows, page by page, so that each write evicts earlier pages.
/// Then verifies all pages, untimed.
pub fn page_out(options: &Options) -> Result<Figures> {
    let mut data = Data::new(options.value("data").unwrap_or("phrases"))?;
    let mut area = Area::new(pages(options)?)?;
    let mut latencies = Latencies::for_count(area.pages());
    let started = Instant::now();
    let mut before = started;
    for number in 0..area.pages() {
        data.write(area.page(number), number);
        let now = Instant::now();
        latencies.record(now - before);
        before = now;
    }
    let seconds = started.elapsed().as_secs_f64();
    if options.value("spoil").is_some() {
        area.spoil();
    }
    area.check_all(&mut data)?;
    let mebibytes = area.mebibytes();
    let figures = Figures::default()
        .with("seconds", seconds)
        .with("throughput_mib_per_s", mebibytes / seconds);
    Ok(latencies.add_to(figures))
}

/// As `memhog SIZE`: sets every byte of a mapping, 10 MB at a time.
pub fn memhog(options: &Options) -> Result<Figures> {
    const CHUNK_PAGES: usize = (10 << 20) / PAGE_SIZE;
    const BYTE: u8 = 0xff;
    let started = Instant::now();
    let mut area = Area::new(pages(options)?)?;
    for first in (0..area.pages()).step_by(CHUNK_PAGES) {
        for number in first..(first + CHUNK_PAGES).min(area.pages()) {
            area.page(number).fill(BYTE);
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    if options.value("spoil").is_some() {
        area.spoil();
    }
    for number in 0..area.pages() {
        if area.page(number).iter().any(|byte| *byte != BYTE) {
            bail!(Wrong(format!(
                "page {number} differs from what was written"
            )));
        }
    }
    let mebibytes = area.mebibytes();
    Ok(Figures::default()
        .with("seconds", seconds)
        .with("throughput_mib_per_s", mebibytes / seconds))
}
