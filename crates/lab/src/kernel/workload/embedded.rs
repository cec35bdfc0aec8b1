//! Memory of the library against anonymous memory with `MADV_PAGEOUT`, in a program that pages out
//! explicitly; no limit applies.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use memfold::{Memfold, Region};
use zsmalloc::PAGE_SIZE;

use super::{
    Data, Figures,
    area::{Area, Pages, Unmapped},
    pages,
    worker::{Order, read_all, spoil},
    workers::MIN_FRACTION_OUT,
};
use crate::{Options, clock::process_cpu};

/// Memory that can be paged out explicitly.
trait Swapped: Pages {
    /// Pages all of it out.
    fn page_out(&mut self) -> Result<()>;

    /// Fraction of the pages that are not resident, from 0 to 1.
    fn fraction_out(&self) -> Result<f64>;

    /// Unmaps it. Returns the cost, background work included.
    fn unmap(self, data: &mut Data) -> Result<Unmapped>;
}

impl Swapped for Area {
    fn page_out(&mut self) -> Result<()> {
        self.advise_page_out()
    }

    fn fraction_out(&self) -> Result<f64> {
        Area::fraction_out(self)
    }

    fn unmap(self, data: &mut Data) -> Result<Unmapped> {
        let took = Area::unmap(self);
        if let Some(place) = took.place {
            Area::check_new(place, data)?;
        }
        Ok(took)
    }
}

struct Folded {
    memfold: Memfold,
    region: Region,
}

impl Pages for Folded {
    fn pages(&self) -> usize {
        self.region.len() / PAGE_SIZE
    }

    fn page(&mut self, number: usize) -> &mut [u8] {
        &mut self.region[number * PAGE_SIZE..][..PAGE_SIZE]
    }
}

impl Swapped for Folded {
    fn page_out(&mut self) -> Result<()> {
        self.region.page_out(..)?;
        Ok(())
    }

    fn fraction_out(&self) -> Result<f64> {
        Ok(1.0 - self.region.resident_bytes() as f64 / self.region.len() as f64)
    }

    fn unmap(self, data: &mut Data) -> Result<Unmapped> {
        let Self { memfold, region } = self;
        let length = region.len();
        let cpu = process_cpu();
        let started = Instant::now();
        drop(region);
        let waited = started.elapsed();
        // The CPU time of the background release is part of the cost.
        memfold.wait_for_release();
        let cpu = process_cpu().saturating_sub(cpu);
        let region = memfold.map(length)?;
        let mut again = Self { memfold, region };
        again.write_all(data);
        again.check_all(data)?;
        Ok(Unmapped {
            waited,
            cpu,
            place: None,
        })
    }
}

/// Runs the phase `--order` on memory of kind `--memory`.
pub fn run(options: &Options) -> Result<Figures> {
    let pages = pages(options)?;
    match options.value("memory").unwrap_or("kernel") {
        "kernel" => phase(options, Area::new(pages)?),
        "memfold" => {
            let bytes = (pages * PAGE_SIZE) as u64;
            // Twice the region: only explicit page-out reclaims.
            let memfold = Memfold::builder().resident_limit(bytes * 2).build()?;
            let region = memfold.map(pages * PAGE_SIZE)?;
            phase(options, Folded { memfold, region })
        }
        other => bail!("--memory is kernel or memfold, not {other:?}"),
    }
}

fn phase(options: &Options, mut memory: impl Swapped) -> Result<Figures> {
    let mut data = Data::new(options.value("data").unwrap_or("recorded"))?;
    memory.write_all(&data);
    let cpu = process_cpu();
    let started = Instant::now();
    memory.page_out()?;
    let seconds = started.elapsed().as_secs_f64();
    let cpu = process_cpu().saturating_sub(cpu);
    let out = memory.fraction_out()?;
    ensure!(
        out >= MIN_FRACTION_OUT,
        "only {:.0} % of the memory was paged out",
        out * 100.0
    );
    match options.value("order").unwrap_or("page-out") {
        "page-out" => {
            let mebibytes = memory.mebibytes();
            spoil(options, &mut memory);
            memory.check_all(&mut data)?;
            Ok(Figures::default()
                .with("seconds", seconds)
                .with("throughput_mib_per_s", mebibytes / seconds)
                .with("timed_cpu_ms", cpu.as_secs_f64() * 1e3))
        }
        order @ ("sequential" | "strided" | "random" | "sparse") => {
            let mut figures = read_all(&mut memory, Order::named(order)?)?;
            for (name, _) in &mut figures.0 {
                if name == "own_cpu_ms" {
                    *name = "timed_cpu_ms".into();
                }
            }
            spoil(options, &mut memory);
            memory.check_all(&mut data)?;
            Ok(figures)
        }
        "unmap" => {
            let mut control = Area::new(64)?;
            control.write_all(&data);
            spoil(options, &mut control);
            let took = memory.unmap(&mut data)?;
            control.check_all(&mut data)?;
            Ok(Figures::default()
                .with("munmap_ms", took.waited.as_secs_f64() * 1e3)
                .with("timed_cpu_ms", took.cpu.as_secs_f64() * 1e3))
        }
        other => bail!(
            "--order is page-out, sequential, strided, random, sparse or unmap, not {other:?}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that stays resident.
    struct Locked(Area);

    impl Pages for Locked {
        fn pages(&self) -> usize {
            self.0.pages()
        }

        fn page(&mut self, number: usize) -> &mut [u8] {
            self.0.page(number)
        }
    }

    impl Swapped for Locked {
        fn page_out(&mut self) -> Result<()> {
            Ok(())
        }

        fn fraction_out(&self) -> Result<f64> {
            self.0.fraction_out()
        }

        fn unmap(self, _: &mut Data) -> Result<Unmapped> {
            Ok(self.0.unmap())
        }
    }

    #[test]
    fn memory_that_was_not_paged_out_has_no_results() {
        for order in ["page-out", "random", "unmap"] {
            let memory = Locked(Area::new(64).unwrap());
            let error = phase(&Options::of(&[("order", order)]), memory).unwrap_err();
            assert!(error.to_string().contains("only 0 %"), "{order}: {error}");
        }
    }

    #[test]
    fn the_library_pages_all_out() {
        let options = Options::of(&[("memory", "memfold"), ("megabytes", "4")]);
        assert!(run(&options).unwrap().get("seconds").is_some());
    }
}
