//! The cases: every workload at a given scale.

use anyhow::{Result, bail, ensure};

use super::{
    backend::{Allowance, Backend},
    build,
    metric::{self, Metric},
    programs::{self, Program},
    redis,
    scale::Scale,
};

/// The workloads and groups of them that a command line may name.
pub const GROUPS: &[&str] = &[
    "munmap",
    "swap",
    "embedded",
    "usemem",
    "memhog",
    "zipf",
    "exit",
    "cpython",
    "node",
    "numpy",
    "sort",
    "sqlite",
    "c++",
    "java",
    "go",
    "luajit",
    "pypy",
    "erlang",
    "racket",
    "r",
    "ocaml",
    "haskell",
    "redis-get",
    "redis-get-bgsave",
    "build",
    "overhead",
];

/// The cases of docs/measurements.md, named `summary` on the command line; each is a part of a
/// report.
pub const SUMMARY: &[&str] = &[
    "cpython",
    "redis-get",
    "munmap-256:recorded",
    "page-out:recorded",
    "swap-in-sequential:recorded",
    "swap-in-random:recorded",
    "build",
    "overhead",
];

/// The smallest limit that memfold accepts, in MB.
const LEAST_RESIDENT: usize = 16;

/// One workload at one size.
#[derive(Debug)]
pub struct Case {
    /// Name of the workload.
    pub workload: String,
    /// MB of each process.
    pub megabytes: usize,
    /// Number of processes.
    pub processes: usize,
    /// Contents of the pages, for workloads with a choice.
    pub data: Option<&'static str>,
    /// Limit of the run.
    pub allowance: Allowance,
    /// What to run.
    pub job: Job,
}

/// What a case runs.
#[derive(Debug)]
pub enum Job {
    /// A workload of the lab.
    Synthetic {
        name: &'static str,
        arguments: Vec<String>,
        /// Whether its memory must be evicted first; how depends on the backend.
        evicts: bool,
    },
    /// An interpreter.
    Program(Program),
    /// redis-server and redis-benchmark.
    Redis(redis::Load),
    /// A compiler.
    Build(build::Project),
}

impl Case {
    /// Whether the case can run under a backend.
    pub fn admits(&self, backend: &Backend) -> bool {
        match (self.allowance, backend) {
            _ if self.is_embedded() => backend.is_kernel() || *backend == Backend::MemfoldEmbedded,
            (_, Backend::MemfoldEmbedded) => false,
            (_, Backend::MemfoldTotal) => self.runs_a_program(),
            (Allowance::Ample, _) => matches!(backend, Backend::Native | Backend::Memfold),
            (Allowance::Resident(_) | Allowance::Total(_), _) => true,
        }
    }

    /// Whether it is a whole program, whose memory is evicted by its own need.
    pub fn runs_a_program(&self) -> bool {
        self.allowance != Allowance::Ample && !matches!(self.job, Job::Synthetic { .. })
    }

    /// The metric by which a whole program is compared.
    pub fn headline(&self) -> Option<&'static Metric> {
        let name = match self.job {
            Job::Redis(_) => "requests_per_s",
            Job::Program(_) | Job::Build(_) | Job::Synthetic { .. } => "seconds",
        };
        metric::find(name).filter(|_| self.runs_a_program())
    }

    /// Whether the program itself calls the library.
    pub fn is_embedded(&self) -> bool {
        self.workload.starts_with("embedded-")
    }

    /// Whether `name` selects the case: its workload, alone or with the number of processes or the
    /// data, as in `munmap-256:3` and `page-out:recorded`.
    fn is_called(&self, name: &str) -> bool {
        match name.split_once(':') {
            None => self.workload == name,
            Some((workload, detail)) => {
                self.workload == workload
                    && (self.data == Some(detail) || self.processes.to_string() == detail)
            }
        }
    }

    /// Size of the swap device: room for the workload, and as much again and 512 MB for a ballast.
    pub fn swap_bytes(&self) -> u64 {
        let megabytes = self.megabytes * self.processes * 2 + 512;
        (megabytes as u64) << 20
    }
}

/// The workloads and groups named on the command line, with `summary` and `programs` expanded.
pub fn names<'a>(given: &[&'a str]) -> Vec<&'a str> {
    let each = given.iter().map(|name| match *name {
        "summary" => SUMMARY.to_vec(),
        "programs" => programs::names().collect(),
        other => vec![other],
    });
    each.flatten().collect()
}

/// The cases of the named workloads and groups.
pub fn cases(names: &[&str], scale: f64) -> Result<Vec<Case>> {
    ensure!(
        scale.is_finite() && scale > 0.0,
        "--scale takes a number above 0, not {scale}"
    );
    let mut all = Vec::new();
    for name in GROUPS {
        all.extend(
            group(name, Scale(scale))
                .into_iter()
                .map(|case| (*name, case)),
        );
    }
    for name in names {
        let known = all
            .iter()
            .any(|(group, case)| group == name || case.is_called(name));
        if !known {
            let mut known: Vec<&str> = Vec::new();
            let workloads = all.iter().map(|(_, case)| case.workload.as_str());
            for name in workloads.chain([
                "munmap", "swap", "embedded", "overhead", "summary", "programs",
            ]) {
                // Two groups may have a workload of the same name.
                if !known.contains(&name) {
                    known.push(name);
                }
            }
            bail!(
                "unknown workload {name:?}; use one of: {}",
                known.join(", ")
            );
        }
    }
    let wanted = |(group, case): &(&str, Case)| {
        names
            .iter()
            .any(|name| group == name || case.is_called(name))
    };
    Ok(all
        .into_iter()
        .filter(wanted)
        .map(|(_, case)| case)
        .collect())
}

fn group(name: &str, scale: Scale) -> Vec<Case> {
    match name {
        "munmap" => munmap(scale),
        "swap" => swap(scale),
        "embedded" => [
            "page-out",
            "sequential",
            "strided",
            "random",
            "sparse",
            "unmap",
        ]
        .map(|order| embedded(order, scale))
        .into(),
        "usemem" => vec![synthetic("usemem", scale.megabytes(128), 4, Vec::new(), 4)],
        "memhog" => vec![synthetic("memhog", scale.megabytes(512), 1, Vec::new(), 4)],
        "zipf" => {
            let operations = scale.count(400_000, 10_000).to_string();
            let arguments = vec!["--operations".to_owned(), operations];
            let mut case = synthetic("zipf", scale.megabytes(256), 1, arguments, 4);
            case.data = Some("recorded");
            vec![case]
        }
        "exit" => vec![evicted(
            "exit",
            "exit",
            scale.megabytes(128),
            6,
            "recorded",
            &[],
        )],
        "redis-get" => vec![redis_get("redis-get", false, scale)],
        "redis-get-bgsave" => vec![redis_get("redis-get-bgsave", true, scale)],
        "build" => vec![Case {
            workload: "build".to_owned(),
            megabytes: build::NATURAL_MEGABYTES,
            processes: 1,
            data: None,
            allowance: Allowance::Resident(build::RESIDENT_MEGABYTES),
            job: Job::Build(build::Project::Both),
        }],
        "overhead" => overhead(scale),
        name => {
            let found = Program::new(name, scale);
            found
                .map(|found| program(found, name))
                .into_iter()
                .collect()
        }
    }
}

/// The published sizes with one process, and 256 MB with 2, 3 and 4, with the published contents,
/// which lz4 compresses 60:1; and 256 MB with recorded contents.
fn munmap(scale: Scale) -> Vec<Case> {
    let sizes = [64, 128, 192, 256, 512].map(|megabytes| (megabytes, 1, "phrases"));
    let several = [2, 3, 4].map(|processes| (256, processes, "phrases"));
    let case = |(megabytes, processes, data)| {
        let name = format!("munmap-{megabytes}");
        let megabytes = scale.megabytes(megabytes);
        evicted(&name, "munmap", megabytes, processes, data, &[])
    };
    let cases = sizes.into_iter().chain(several).map(case);
    cases.chain([case((256, 1, "recorded"))]).collect()
}

fn swap(scale: Scale) -> Vec<Case> {
    let megabytes = scale.megabytes(256);
    let mut cases = Vec::new();
    for data in ["phrases", "recorded"] {
        let mut page_out = synthetic("page-out", megabytes, 1, Vec::new(), 8);
        page_out.data = Some(data);
        cases.push(page_out);
        for order in ["sequential", "random"] {
            let name = format!("swap-in-{order}");
            cases.push(evicted(
                &name,
                "swap-in",
                megabytes,
                1,
                data,
                &["--order", order],
            ));
        }
    }
    cases
}

fn embedded(order: &'static str, scale: Scale) -> Case {
    let name = match order {
        "page-out" | "unmap" => format!("embedded-{order}"),
        order => format!("embedded-swap-in-{order}"),
    };
    let megabytes = scale.megabytes(256);
    evicted(
        &name,
        "embedded",
        megabytes,
        1,
        "recorded",
        &["--order", order],
    )
}

/// A workload that may have 1/`share` of its memory resident.
fn synthetic(
    name: &'static str,
    megabytes: usize,
    processes: usize,
    arguments: Vec<String>,
    share: usize,
) -> Case {
    // At least twice memfold's smallest limit, at any scale.
    let megabytes = megabytes.max((2 * LEAST_RESIDENT).div_ceil(processes));
    Case {
        workload: name.to_owned(),
        megabytes,
        processes,
        data: None,
        allowance: Allowance::Resident((megabytes * processes / share).max(LEAST_RESIDENT)),
        job: Job::Synthetic {
            name,
            arguments,
            evicts: false,
        },
    }
}

/// A workload whose memory fits the limit, but is evicted before the timed part.
fn evicted(
    workload: &str,
    name: &'static str,
    megabytes: usize,
    processes: usize,
    data: &'static str,
    arguments: &[&str],
) -> Case {
    let all = megabytes * processes;
    Case {
        workload: workload.to_owned(),
        megabytes,
        processes,
        data: Some(data),
        allowance: Allowance::Resident(all + all / 4 + 16 * (processes + 1)),
        job: Job::Synthetic {
            name,
            arguments: arguments.iter().map(|word| (*word).to_owned()).collect(),
            evicts: true,
        },
    }
}

fn program(program: Program, workload: &str) -> Case {
    Case {
        workload: workload.to_owned(),
        megabytes: program.megabytes,
        processes: 1,
        data: None,
        allowance: Allowance::Resident(program.resident_megabytes),
        job: Job::Program(program),
    }
}

fn redis_get(workload: &str, save: bool, scale: Scale) -> Case {
    let load = redis::Load::new(save, scale);
    Case {
        workload: workload.to_owned(),
        megabytes: scale.megabytes(351).max(redis::LEAST_MEGABYTES),
        processes: 1,
        data: None,
        // 10 MB of these are the server's own memory.
        allowance: Allowance::Resident(scale.megabytes(200).max(redis::LEAST_MEGABYTES * 4 / 7)),
        job: Job::Redis(load),
    }
}

/// The overhead of memfold far below the limit.
fn overhead(scale: Scale) -> Vec<Case> {
    let cpython = Program::new("cpython", scale);
    let mut cases: Vec<Case> = cpython
        .map(|cpython| program(cpython, "overhead-cpython"))
        .into_iter()
        .collect();
    cases.extend([
        redis_get("overhead-redis-get", false, scale),
        Case {
            workload: "overhead-build".to_owned(),
            megabytes: build::NATURAL_MEGABYTES,
            processes: 1,
            data: None,
            allowance: Allowance::Ample,
            job: Job::Build(build::Project::C),
        },
    ]);
    for case in &mut cases {
        case.allowance = Allowance::Ample;
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_groups_select_cases() {
        let all_munmap = cases(&["munmap"], 1.0).unwrap();
        assert_eq!(all_munmap.len(), 9);
        let one = cases(&["munmap-64"], 1.0).unwrap();
        assert_eq!((one.len(), one[0].megabytes), (1, 64));
        let several = cases(&["munmap-256"], 0.5).unwrap();
        let processes: Vec<usize> = several.iter().map(|case| case.processes).collect();
        assert_eq!(processes, [1, 2, 3, 4, 1]);
        assert_eq!(several[0].megabytes, 128);
        let error = cases(&["munmap-65"], 1.0).unwrap_err().to_string();
        assert!(
            error.contains("zipf") && error.contains("munmap-512"),
            "{error}"
        );
        let (_, listed) = error.split_once(": ").unwrap();
        let mut names: Vec<&str> = listed.split(", ").collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "{error}");
        let three = cases(&["munmap-256:3"], 1.0).unwrap();
        assert_eq!((three.len(), three[0].processes), (1, 3));
        let recorded = cases(&["page-out:recorded"], 1.0).unwrap();
        assert_eq!((recorded.len(), recorded[0].data), (1, Some("recorded")));
        assert!(cases(&["page-out:none"], 1.0).is_err());
        assert!(cases(&["zipf"], 0.0).is_err() && cases(&["zipf"], f64::NAN).is_err());
    }

    #[test]
    fn every_program_is_a_workload() {
        let programs = cases(&names(&["programs"]), 1.0).unwrap();
        assert_eq!(programs.len(), programs::names().count());
        assert!(programs.iter().all(Case::runs_a_program));
    }

    #[test]
    fn the_summary_names_existing_cases() {
        assert_eq!(names(&["summary", "zipf"]).len(), SUMMARY.len() + 1);
        let cases = cases(&names(&["summary"]), 1.0).unwrap();
        // The group `overhead` has three cases.
        assert_eq!(cases.len(), SUMMARY.len() + 2);
    }

    #[test]
    fn every_group_has_cases_with_a_limit_below_their_need_or_an_eviction() {
        for (name, scale) in GROUPS.iter().flat_map(|name| [(name, 1.0), (name, 0.05)]) {
            let cases = cases(&[name], scale).unwrap();
            assert!(!cases.is_empty(), "{name}");
            for case in cases {
                let evicts = matches!(case.job, Job::Synthetic { evicts: true, .. });
                let Allowance::Resident(resident) = case.allowance else {
                    assert!(case.workload.starts_with("overhead-"));
                    continue;
                };
                assert!(resident >= LEAST_RESIDENT, "{case:?}");
                assert!(
                    evicts || resident < case.megabytes * case.processes,
                    "{case:?}"
                );
            }
        }
    }
}
