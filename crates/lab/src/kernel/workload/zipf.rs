//! Zipf-distributed accesses, as of a cache: few hot pages, many cold ones.

use std::time::Instant;

use anyhow::{Result, bail};

use super::{
    Data, Figures, Wrong,
    area::{Area, Pages},
    latency::Latencies,
    pages,
};
use crate::{Options, random::Random};

/// Zipf exponent, as key-value benchmarks use. A larger value concentrates accesses on fewer pages.
const EXPONENT: f64 = 0.99;
/// Bytes of a page's write counter, after the stamp.
const COUNTER: std::ops::Range<usize> = 8..16;

/// Accesses pages by Zipf's law; every second access writes. Ranks are shuffled over the memory, so
/// that the neighbours of a hot page are no hotter than others.
pub fn run(options: &Options) -> Result<Figures> {
    let data = Data::new(options.value("data").unwrap_or("recorded"))?;
    let mut area = Area::new(pages(options)?)?;
    let operations = options.number("operations", 200_000)?;
    let mut random = Random::new(42);
    let mut page_of_rank: Vec<u32> = (0..area.pages() as u32).collect();
    random.shuffle(&mut page_of_rank);
    let ranks = Ranks::new(area.pages());
    let mut expected = vec![0_u32; area.pages()];
    for number in 0..area.pages() {
        data.write(area.page(number), number);
        area.page(number)[COUNTER].fill(0);
    }
    let mut latencies = Latencies::for_count(operations);
    let started = Instant::now();
    for operation in 0..operations {
        let number = page_of_rank[ranks.pick(&mut random)] as usize;
        let before = Instant::now();
        let page = area.page(number);
        if !Data::has_stamp(page, number) {
            bail!(Wrong(format!("page {number} has a wrong stamp")));
        }
        if operation % 2 == 0 {
            let count = counter(page) + 1;
            page[COUNTER].copy_from_slice(&count.to_le_bytes());
            expected[number] += 1;
        }
        latencies.record(before.elapsed());
    }
    let seconds = started.elapsed().as_secs_f64();
    if options.value("spoil").is_some() {
        area.spoil();
    }
    let mut whole = vec![0; zsmalloc::PAGE_SIZE];
    for (number, count) in expected.into_iter().enumerate() {
        if counter(area.page(number)) != u64::from(count) {
            bail!(Wrong(format!("page {number} lost a write")));
        }
        data.write(&mut whole, number);
        whole[COUNTER].copy_from_slice(&u64::from(count).to_le_bytes());
        if area.page(number) != whole {
            bail!(Wrong(format!(
                "page {number} differs from what was written"
            )));
        }
    }
    let figures = Figures::default()
        .with("seconds", seconds)
        .with("operations_per_s", operations as f64 / seconds);
    Ok(latencies.add_to(figures))
}

fn counter(page: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&page[COUNTER]);
    u64::from_le_bytes(bytes)
}

/// Cumulative weights of the ranks.
struct Ranks(Vec<f64>);

impl Ranks {
    fn new(count: usize) -> Self {
        let mut sum = 0.0;
        let sums = (1..=count).map(|rank| {
            sum += 1.0 / (rank as f64).powf(EXPONENT);
            sum
        });
        Self(sums.collect())
    }

    fn pick(&self, random: &mut Random) -> usize {
        let total = self.0.last().copied().unwrap_or(0.0);
        let point = (random.next() >> 11) as f64 / (1_u64 << 53) as f64 * total;
        self.0
            .partition_point(|sum| *sum < point)
            .min(self.0.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_ranks_are_picked_by_zipfs_law() {
        let ranks = Ranks::new(1000);
        let mut random = Random::new(1);
        let mut counts = [0.0_f64; 1000];
        for _ in 0..200_000 {
            counts[ranks.pick(&mut random)] += 1.0;
        }
        for rank in [2_usize, 4, 8] {
            let expected = (rank as f64).powf(EXPONENT);
            let found = counts[0] / counts[rank - 1];
            assert!((found / expected - 1.0).abs() < 0.1, "rank {rank}: {found}");
        }
    }
}
