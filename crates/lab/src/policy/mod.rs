//! Replacement policies on page traces of real programs and on generated ones.

mod arc;
mod lirs;
mod lists;
mod optimum;
mod plot;
mod queue;
mod replay;
mod s3_fifo;
mod simple;
#[cfg(test)]
mod tests;
mod traces;

use std::{path::Path, sync::Mutex, thread};

use anyhow::{Context, Result, ensure};

use self::{
    arc::Arc,
    lirs::Lirs,
    optimum::Optimum,
    queue::Page,
    replay::{Blind, Policy, faults},
    s3_fifo::S3Fifo,
    simple::{Clock, Dip, Fifo, Lru},
    traces::Trace,
};
use crate::{
    Options,
    report::{Report, Row, rounded},
};
use memfold_pager::replay::ReplayedMemory;

/// What a policy learns of the accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Knowledge {
    /// Page faults only, as in user space.
    Faults,
    /// Every access.
    Accesses,
    /// Every access to come.
    Future,
}

impl Knowledge {
    fn name(self) -> &'static str {
        match self {
            Self::Faults => "faults",
            Self::Accesses => "accesses",
            Self::Future => "future",
        }
    }
}

/// Makes a policy for a number of pages, a memory and the accesses to come.
type Make = fn(usize, usize, &[Page]) -> Box<dyn Policy>;

/// A policy with what it knows.
#[derive(Debug, Clone, Copy)]
struct Contestant {
    name: &'static str,
    knowledge: Knowledge,
    make: Make,
}

macro_rules! contestants {
    ($($name:literal $knowledge:ident $make:expr;)*) => {
        /// The policies, by what they know.
        const CONTESTANTS: &[Contestant] = &[$(Contestant {
            name: $name,
            knowledge: Knowledge::$knowledge,
            make: $make,
        }),*];
    };
}

contestants! {
    "optimum" Future |pages, room, accesses| Box::new(Optimum::new(pages, room, accesses));
    "two-lists" Faults |pages, room, _| Box::new(ReplayedMemory::new(pages, room));
    "clock-hand" Faults |pages, room, _| Box::new(ReplayedMemory::with_hand_alone(pages, room));
    "fifo" Faults |pages, room, _| Box::new(Fifo::new(pages, room));
    "bip-blind" Faults |pages, room, _| Box::new(Blind(Lru::bimodal(pages, room)));
    "arc-blind" Faults |pages, room, _| Box::new(Blind(Arc::new(pages, room)));
    "lirs-blind" Faults |pages, room, _| Box::new(Blind(Lirs::new(pages, room)));
    "s3-fifo-blind" Faults |pages, room, _| Box::new(Blind(S3Fifo::new(pages, room)));
    "two-lists-accessed" Accesses |pages, room, _| Box::new(ReplayedMemory::that_sees_accesses(pages, room));
    "clock" Accesses |pages, room, _| Box::new(Clock::new(pages, room));
    "lru" Accesses |pages, room, _| Box::new(Lru::new(pages, room));
    "bip" Accesses |pages, room, _| Box::new(Lru::bimodal(pages, room));
    "dip" Accesses |pages, room, _| Box::new(Dip::new(pages, room));
    "arc" Accesses |pages, room, _| Box::new(Arc::new(pages, room));
    "lirs" Accesses |pages, room, _| Box::new(Lirs::new(pages, room));
    "s3-fifo" Accesses |pages, room, _| Box::new(S3Fifo::new(pages, room));
}

/// Refaults, that is, faults without first touches.
#[derive(Debug, Clone, Copy)]
struct Refaults {
    policy: &'static Contestant,
    /// Per cent of the pages that fit.
    share: usize,
    count: usize,
}

/// Every policy with memory for each share of the pages.
fn replay(trace: &Trace, policies: &[&'static Contestant], shares: &[usize]) -> Vec<Refaults> {
    let mut jobs = Vec::new();
    for &share in shares {
        jobs.extend(policies.iter().map(|policy| (*policy, share)));
    }
    let jobs = Mutex::new(jobs);
    let found = Mutex::new(Vec::new());
    let lock = "no replay panics with a lock";
    let work = || {
        while let Some((policy, share)) = { jobs.lock().expect(lock).pop() } {
            let mut memory = (policy.make)(trace.pages, room(trace, share), &trace.accesses);
            let count = faults(memory.as_mut(), &trace.accesses) - trace.pages;
            found.lock().expect(lock).push(Refaults {
                policy,
                share,
                count,
            });
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    found.into_inner().expect(lock)
}

fn room(trace: &Trace, share: usize) -> usize {
    (trace.pages * share / 100).max(1)
}

fn count_of(found: &[Refaults], policy: &str, share: usize) -> Option<usize> {
    let found = found
        .iter()
        .find(|one| one.policy.name == policy && one.share == share);
    found.map(|one| one.count)
}

/// Records a trace from standard input with `--record`, or replays traces.
pub fn run(options: &Options) -> Result<Option<Report>> {
    if let Some(file) = options.value("record") {
        return record(Path::new(file)).map(|()| None);
    }
    let every: Vec<&str> = CONTESTANTS.iter().map(|policy| policy.name).collect();
    let every = every.join(",");
    let mut policies = vec![&CONTESTANTS[0]];
    for name in options.list("policy", &every) {
        let found = CONTESTANTS.iter().find(|policy| policy.name == name);
        let found = found.with_context(|| format!("unknown policy {name:?}: of {every}"))?;
        if !policies.iter().any(|policy| policy.name == name) {
            policies.push(found);
        }
    }
    let shares = options.numbers("share", "33,45,50,80")?;
    ensure!(
        shares.iter().all(|share| (1..=100).contains(share)),
        "--share takes per cent of the pages"
    );
    let out = options.value("out").map(Path::new);
    if let Some(out) = out {
        std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    }
    let all: Vec<&str> = traces::names().collect();
    let all = all.join(",");
    let mut report = Report::new("policy");
    for name in options.list("trace", &all) {
        let trace = Trace::find(name)?;
        let found = replay(&trace, &policies, &shares);
        for &share in &shares {
            add_to(&mut report, (&trace, share), &policies, &found);
        }
        if let Some(out) = out {
            let found = replay(&trace, &policies, &plot::SHARES);
            let file = out.join(format!("policy-{}.svg", plot::file_name(&trace.name)));
            let svg = plot::draw(&trace, &policies, &found)?;
            std::fs::write(&file, svg)
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    report.note(
        "Faults without first touches, as a multiple of the optimum's, with memory for a share of the \
         pages. two-lists, clock-hand, fifo and -blind know faults only; the others every access.",
    );
    Ok(Some(report))
}

fn record(file: &Path) -> Result<()> {
    let name = file.display().to_string();
    let trace = Trace::read(name.clone(), &mut std::io::stdin().lock())?;
    let packed = trace.encode()?;
    std::fs::write(file, &packed).with_context(|| format!("cannot write {name}"))?;
    let (pages, accesses) = (trace.pages, trace.accesses.len());
    let text = format!(
        "{name}: {accesses} accesses to {pages} pages in {} bytes\n",
        packed.len()
    );
    crate::output::say(text.as_bytes())
}

/// Adds a row for each policy, and a line of the table with all of them.
fn add_to(
    report: &mut Report,
    (trace, share): (&Trace, usize),
    policies: &[&'static Contestant],
    found: &[Refaults],
) {
    let optimum = count_of(found, "optimum", share).unwrap_or(0);
    let of_trace = Row::new()
        .with("trace", trace.name.as_ref())
        .with("pages", trace.pages)
        .with("accesses", trace.accesses.len())
        .with("room", room(trace, share));
    let mut line = of_trace
        .clone()
        .with("share_percent", share)
        .with("optimum_refaults", optimum);
    for policy in policies {
        let Some(count) = count_of(found, policy.name, share) else {
            continue;
        };
        // Nothing to compare with where the optimum never refaults.
        let ratio = (optimum > 0).then(|| rounded(count as f64 / optimum as f64));
        if policy.knowledge != Knowledge::Future {
            line = line.with(policy.name, ratio);
        }
        let row = of_trace
            .clone()
            .with("policy", policy.name)
            .with("knowledge", policy.knowledge.name())
            .with("resident_share", rounded(share as f64 / 100.0))
            .with("misses", count + trace.pages)
            .with("refaults", count)
            .with("ratio_to_optimum", ratio)
            // Nothing is left to chance.
            .with("runs", 1)
            .with("spread", 1.0);
        report.add(row);
    }
    report.show(line);
}
