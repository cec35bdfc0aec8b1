//! Pages a second that the tier sends and fetches, without a program: `tier ADDRESS [PAGES]`.

use std::time::Instant;

use memfold_remote::{Options, RemoteStore};
use memfold_swap::{PAGE_SIZE, Page, Scratch, SwapConfig, SwapSpace};
use zsmalloc::HeapSource;

/// A page that compresses about 2:1.
fn page(seed: u64) -> Page {
    let mut page = [0; PAGE_SIZE];
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for (index, bytes) in page.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        *bytes = if index % 2 == 0 { random } else { seed }.to_le_bytes();
    }
    page
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("give an address")?.parse()?;
    let pages: u64 = arguments.next().map_or(Ok(50_000), |text| text.parse())?;
    let store = RemoteStore::open(&Options::new(address))?;
    let config = SwapConfig {
        pool_capacity_pages: 1 << 18,
        max_slots: 1 << 20,
        ..SwapConfig::default()
    };
    let mut space = SwapSpace::new(HeapSource::new(), config)?;
    space.add_tier(Box::new(store.tier()))?;
    let mut scratch = Scratch::new();
    let slots = (0..pages).map(|seed| space.store(&page(seed), &mut scratch));
    let slots: Vec<_> = slots.collect::<Result<_, _>>()?;

    let began = Instant::now();
    space.write_back(u64::MAX, &mut scratch);
    let out = began.elapsed().as_secs_f64();
    let sent = space.usage().remote_pages;
    let mebibytes = space.usage().remote_bytes as f64 / f64::from(1 << 20);
    println!(
        "out: {:.0} pages a second, {:.0} MiB a second",
        sent as f64 / out,
        mebibytes / out
    );

    for (window, threads) in [(1, 1), (16, 1), (1, 8), (16, 8)] {
        let part = slots.len().div_ceil(threads);
        let began = Instant::now();
        std::thread::scope(|scope| {
            for part in slots.chunks(part) {
                let space = &space;
                scope.spawn(move || {
                    let (mut out, mut scratch) = ([0; PAGE_SIZE], Scratch::new());
                    for slots in part.chunks(window) {
                        space.prefetch(slots.iter().copied());
                        for slot in slots {
                            space
                                .load(*slot, &mut out, &mut scratch)
                                .expect("it is there");
                        }
                    }
                });
            }
        });
        let took = began.elapsed().as_secs_f64();
        println!(
            "in, {window} at once, {threads} threads: {:.0} pages a second, {:.0} us a request",
            pages as f64 / took,
            took * 1e6 * (window * threads) as f64 / pages as f64
        );
    }
    Ok(())
}
