//! The processes that [`super::workers`] starts: workers, which hold memory, and the ballast, which
//! evicts it.
//!
//! A worker reads orders from its standard input, one per line, and replies with one line of JSON.

use std::{
    io::stdin,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{
    Data, Figures, Wrong,
    area::{Area, Pages, Unmapped},
    latency::Latencies,
    pages, report,
};
use crate::{Options, clock::process_cpu, random::Random};
use zsmalloc::PAGE_SIZE;

/// Pages of a second mapping, verified after the first was unmapped: unmap must not affect it.
const CONTROL_PAGES: usize = 256;

/// Fills its memory, reports, and handles orders until end of file.
pub fn run(options: &Options) -> Result<()> {
    let mut data = Data::new(options.value("data").unwrap_or("phrases"))?;
    let mut control = Area::new(CONTROL_PAGES)?;
    control.write_all(&data);
    let mut area = Some(Area::new(pages(options)?)?);
    let filled = area
        .as_mut()
        .map_or(Duration::ZERO, |area| area.write_all(&data));
    let mut place = None;
    let mut spent = Duration::ZERO;
    report(&Figures::default().with("fill_s", filled.as_secs_f64()))?;
    for line in stdin().lines() {
        let line = line?;
        let figures = match line.as_str() {
            "page-out" => {
                let started = Instant::now();
                area.as_ref()
                    .context("the worker's memory is unmapped already")?
                    .advise_page_out()?;
                Figures::default().with("page_out_s", started.elapsed().as_secs_f64())
            }
            "out?" => {
                let held = area
                    .as_ref()
                    .context("the worker's memory is unmapped already")?;
                Figures::default().with("fraction_out", held.fraction_out()?)
            }
            "munmap" => {
                spent = process_cpu();
                let took = area.take().map_or(Unmapped::default(), Area::unmap);
                place = took.place;
                Figures::default().with("munmap_ms", took.waited.as_secs_f64() * 1e3)
            }
            "read-sequential" | "read-random" => {
                spent = process_cpu();
                let held = area
                    .as_mut()
                    .context("the worker's memory is unmapped already")?;
                read_all(held, Order::named(&line["read-".len()..])?)?
            }
            "spent?" => {
                let spent = process_cpu().saturating_sub(spent);
                Figures::default().with("own_cpu_ms", spent.as_secs_f64() * 1e3)
            }
            "check" => {
                if let Some(held) = area.as_mut() {
                    spoil(options, held);
                    held.check_all(&mut data)?;
                }
                if let Some(place) = place.take() {
                    Area::check_new(place, &mut data)?;
                    spoil(options, &mut control);
                    control.check_all(&mut data)?;
                }
                Figures::default()
            }
            other => bail!("worker: unknown order {other:?}"),
        };
        report(&figures)?;
    }
    Ok(())
}

/// Flips a bit if `--spoil` was given, to test the checks.
pub fn spoil(options: &Options, area: &mut impl Pages) {
    if options.value("spoil").is_some() {
        area.spoil();
    }
}

/// The order in which pages are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Sequential,
    /// By the columns of a matrix with rows of five pages.
    Strided,
    Random,
    /// One page in 16, at random: no two neighbours are read.
    Sparse,
}

impl Order {
    /// The order of that name.
    pub fn named(name: &str) -> Result<Order> {
        match name {
            "sequential" => Ok(Order::Sequential),
            "strided" => Ok(Order::Strided),
            "random" => Ok(Order::Random),
            "sparse" => Ok(Order::Sparse),
            other => bail!("unknown order {other:?}"),
        }
    }

    fn of(self, pages: usize) -> Vec<u32> {
        const ROW: usize = 5;
        const SPACING: usize = 16;
        let mut order: Vec<u32> = (0..pages as u32).collect();
        match self {
            Order::Sequential => {}
            Order::Strided => order.sort_by_key(|page| (*page as usize % ROW, *page)),
            Order::Random => Random::new(3).shuffle(&mut order),
            Order::Sparse => {
                order.retain(|page| (*page as usize).is_multiple_of(SPACING));
                Random::new(3).shuffle(&mut order);
            }
        }
        order
    }
}

/// Reads and checks the stamp of every page in an order.
pub fn read_all(area: &mut impl Pages, order: Order) -> Result<Figures> {
    let order = order.of(area.pages());
    let mebibytes = (order.len() * PAGE_SIZE) as f64 / f64::from(1 << 20);
    let mut latencies = Latencies::for_count(order.len());
    let cpu = process_cpu();
    let started = Instant::now();
    let mut before = started;
    for number in order {
        let number = number as usize;
        if !Data::has_stamp(area.page(number), number) {
            bail!(Wrong(format!("page {number} has a wrong stamp")));
        }
        let now = Instant::now();
        latencies.record(now - before);
        before = now;
    }
    let seconds = started.elapsed().as_secs_f64();
    let figures = Figures::default()
        .with("seconds", seconds)
        .with("throughput_mib_per_s", mebibytes / seconds)
        .with(
            "own_cpu_ms",
            process_cpu().saturating_sub(cpu).as_secs_f64() * 1e3,
        );
    Ok(latencies.add_to(figures))
}

/// Writes its memory once, and again for every line on standard input; reports each time.
pub fn ballast(options: &Options) -> Result<()> {
    let data = Data::new(options.value("data").unwrap_or("phrases"))?;
    let mut area = Area::new(pages(options)?)?;
    area.write_all(&data);
    report(&Figures::default())?;
    for line in stdin().lines() {
        line?;
        area.write_all(&data);
        report(&Figures::default())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_full_order_has_every_page_once() {
        for name in ["sequential", "strided", "random"] {
            let order = Order::named(name).unwrap();
            let mut pages = order.of(23);
            match order {
                Order::Strided => assert_eq!(pages[..7], [0, 5, 10, 15, 20, 1, 6]),
                Order::Sequential => assert!(pages.is_sorted()),
                Order::Random | Order::Sparse => assert!(!pages.is_sorted()),
            }
            pages.sort_unstable();
            assert_eq!(pages, (0..23).collect::<Vec<u32>>());
        }
        assert!(Order::named("backwards").is_err());
    }

    #[test]
    fn a_sparse_order_has_no_neighbours() {
        let mut pages = Order::named("sparse").unwrap().of(160);
        assert!(!pages.is_sorted());
        pages.sort_unstable();
        assert_eq!(pages, (0..160).step_by(16).collect::<Vec<u32>>());
    }
}
