//! Policies against outcomes that are known, and the traces.

use super::{
    traces::{Trace, names},
    *,
};
use proptest::prelude::*;

fn contestant(name: &str) -> &'static Contestant {
    let found = CONTESTANTS.iter().find(|policy| policy.name == name);
    found.unwrap_or_else(|| panic!("{name} is no policy"))
}

/// Faults, first touches included.
fn count(name: &str, room: usize, accesses: &[Page]) -> usize {
    let pages = accesses.iter().max().map_or(0, |page| *page as usize + 1);
    let mut policy = (contestant(name).make)(pages, room, accesses);
    faults(policy.as_mut(), accesses)
}

/// Belady, Nelson and Shedler: FIFO may fault more often with more memory.
#[test]
fn fifo_has_beladys_anomaly() {
    let accesses = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5];
    assert_eq!(count("fifo", 3, &accesses), 9);
    assert_eq!(count("fifo", 4, &accesses), 10);
    assert_eq!(count("lru", 3, &accesses), 10);
    assert_eq!(count("lru", 4, &accesses), 8);
    assert_eq!(count("optimum", 3, &accesses), 7);
    assert_eq!(count("optimum", 4, &accesses), 6);
}

/// The sequence of textbooks on operating systems, with three frames.
#[test]
fn textbook_faults() {
    let accesses = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1];
    for (name, faults) in [("fifo", 15), ("lru", 12), ("clock", 11), ("optimum", 9)] {
        assert_eq!(count(name, 3, &accesses), faults, "{name}");
    }
}

/// A page that was accessed gets one second chance.
#[test]
fn clock_gives_a_second_chance() {
    // 0 is accessed, so 1 leaves for 3, and the chance is used up: 2 and 0 leave for 4 and 5.
    let accesses = [0, 1, 2, 0, 3, 0];
    assert_eq!(count("clock", 3, &accesses), 4);
    assert_eq!(count("fifo", 3, &accesses), 5);
}

/// Faults after the first way round, for each further one.
fn per_lap(name: &str, room: usize) -> f64 {
    let laps = |laps: usize| (0..laps).flat_map(|_| 0..1000).collect::<Vec<Page>>();
    (count(name, room, &laps(60)) - count(name, room, &laps(10))) as f64 / 50.0
}

/// LRU and its like lose every page of a cycle; what keeps the pages of the last way round does not.
#[test]
fn cycles_tell_policies_apart() {
    for name in ["fifo", "clock", "lru", "arc", "arc-blind", "clock-hand"] {
        assert_eq!(per_lap(name, 500), 1000.0, "{name}");
    }
    for name in ["optimum", "lirs", "bip", "bip-blind", "dip"] {
        let faults = per_lap(name, 500);
        assert!((500.0..=560.0).contains(&faults), "{name}: {faults}");
    }
    // An eighth of so small a memory is the inactive list.
    let faults = per_lap("two-lists", 500);
    assert!((500.0..=660.0).contains(&faults), "{faults}");
}

/// A page used again stays through a scan.
#[test]
fn scans_leave_what_is_used_again() {
    let mut accesses: Vec<Page> = Vec::new();
    for round in 0..40 {
        accesses.extend((0..3).flat_map(|_| 0..30));
        accesses.extend((0..200).map(|page| 100 + (round * 200 + page) % 4000));
    }
    let first = 30 + 4000;
    let scans = 40 * 200 + 30 + 40;
    for name in ["arc", "lirs", "s3-fifo"] {
        let faults = count(name, 100, &accesses);
        assert!(
            faults >= first && faults <= scans * 103 / 100,
            "{name}: {faults}"
        );
    }
    assert!(count("lru", 100, &accesses) >= 40 * 230);
}

/// LIRS has no page with a short distance in so small a memory.
#[test]
fn lirs_works_with_two_pages() {
    assert_eq!(count("lirs", 2, &[7, 0, 7, 7, 7, 0, 0]), 2);
    assert_eq!(count("lirs", 1, &[7, 0, 7, 7, 7, 0, 0]), 4);
}

#[test]
fn every_trace_is_valid() {
    let of = |name: &str| match name {
        "cpython" => 5548,
        "sqlite" => 4063,
        "cc1plus" => 8639,
        "luajit" => 2321,
        "ocaml" => 2266,
        "sort" => 2335,
        _ => 5003,
    };
    for name in names() {
        let trace = Trace::find(name).unwrap();
        assert_eq!(trace.pages, of(name), "{name}");
        let mut is_used = vec![false; trace.pages];
        trace
            .accesses
            .iter()
            .for_each(|page| is_used[*page as usize] = true);
        assert!(is_used.iter().all(|is_used| *is_used), "{name}");
        assert!(trace.accesses.len() > 10 * trace.pages, "{name}");
    }
    assert!(Trace::find("no-such-trace").is_err());
}

#[test]
fn what_is_no_trace_is_refused() {
    let whole = Trace::new("t", &[1 << 40, 7, 1 << 40, 9]).encode().unwrap();
    assert!(Trace::decode("t", &whole).is_ok());
    assert!(Trace::decode("t", &whole[..whole.len() - 1]).is_err());
    assert!(Trace::decode("t", b"").is_err());
    assert!(Trace::read("t".to_owned(), &mut &[1_u8, 2, 3][..]).is_err());
}

/// Ratios and plots of a small trace, from a file.
#[test]
fn a_report_has_a_row_for_each_share() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("small");
    let addresses: Vec<u64> = (0..2000).map(|access| access % 200 * 3).collect();
    let trace = Trace::new("small", &addresses);
    std::fs::write(&file, trace.encode().unwrap()).unwrap();
    let (file, out) = (file.to_str().unwrap(), folder.path().join("plots"));
    let out_name = out.to_str().unwrap();
    let options = Options::of(&[("trace", file), ("share", "50,100"), ("out", out_name)]);
    run(&options).unwrap().expect("a report");
    let plots: Vec<_> = std::fs::read_dir(&out).unwrap().collect();
    assert_eq!(plots.len(), 1);
    let svg = std::fs::read_to_string(plots[0].as_ref().unwrap().path()).unwrap();
    assert!(CONTESTANTS.iter().all(|policy| svg.contains(policy.name)));

    let all: Vec<&Contestant> = CONTESTANTS.iter().collect();
    let found = replay(&trace, &all, &[50, 100]);
    assert_eq!(count_of(&found, "fifo", 50), Some(1800));
    assert_eq!(count_of(&found, "optimum", 100), Some(0));
    for (name, value) in [("policy", "no-such"), ("share", "0"), ("trace", "no-such")] {
        assert!(run(&Options::of(&[(name, value)])).is_err(), "{name}");
    }
}

fn accesses() -> impl Strategy<Value = Vec<Page>> {
    // Uniform, and with a hot part.
    let page = prop_oneof![0..40_u32, 0..8_u32];
    prop::collection::vec(page, 1..600)
}

proptest! {
    #[test]
    fn no_policy_exceeds_its_memory_or_beats_the_optimum(accesses in accesses(), room in 1..40_usize) {
        let least = count("optimum", room, &accesses);
        for policy in CONTESTANTS {
            let mut memory = (policy.make)(40, room, &accesses);
            let mut faults = 0;
            for &page in &accesses {
                if memory.is_resident(page) {
                    memory.hit(page);
                } else {
                    memory.fault(page);
                    faults += 1;
                }
                prop_assert!(memory.is_resident(page), "{} lost page {page}", policy.name);
                let resident = memory.resident();
                let counted = (0..40).filter(|page| memory.is_resident(*page)).count();
                prop_assert_eq!(counted, resident, "{}", policy.name);
                prop_assert!(resident <= room, "{}: {resident} of {room}", policy.name);
            }
            prop_assert!(faults >= least, "{}: {faults} of {least}", policy.name);
        }
    }

    /// What LRU and the optimum keep, they keep with more memory too.
    #[test]
    fn stack_policies_fault_less_with_more_memory(accesses in accesses(), room in 1..39_usize) {
        let mut small = Lru::new(40, room);
        let mut large = Lru::new(40, room + 1);
        for page in &accesses {
            faults(&mut small, &[*page]);
            faults(&mut large, &[*page]);
            for page in 0..40 {
                prop_assert!(!small.is_resident(page) || large.is_resident(page));
            }
        }
        prop_assert!(count("optimum", room + 1, &accesses) <= count("optimum", room, &accesses));
    }

    #[test]
    fn traces_survive_packing(addresses in prop::collection::vec(any::<u64>(), 1..300)) {
        let trace = Trace::new("t", &addresses);
        prop_assert_eq!(Trace::decode("t", &trace.encode().unwrap()).unwrap(), trace);
    }
}
