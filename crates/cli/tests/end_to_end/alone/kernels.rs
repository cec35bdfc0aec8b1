//! Other kernels than this machine's, booted: `tests/kernels`. They see this machine's files, and run these same tests.

use crate::support::{compiled, memfold, rounds, skip};
use std::path::PathBuf;
use std::process::{Command, Output};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/kernels");

/// What a kernel that pages out must get right: pages, forks, crashes, and Redis.
const PROGRAMS: &str = "alone::torture::pages_survive alone::torture::a_tree_of_forks alone::redis alone::crash \
    beside::crash beside::prepared";

/// What of that ends within minutes on an emulated processor. Forks of programs far above their limit do not.
const PROGRAMS_EMULATED: &str = "alone::torture::pages_survive_m alone::torture::pages_survive_reclaim_alone \
    alone::crash beside::crash::the_supervisors_death_ends_the_program_before";

/// What of containers ends within minutes on an emulated processor.
const CONTAINERS: &str =
    "beside::containers::the_containers_memory beside::containers::a_tree_of_forks";

/// As `run.sh` decides.
fn has_kvm() -> bool {
    let processor = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut flags = processor.split_ascii_whitespace();
    std::path::Path::new("/dev/kvm").exists() && flags.any(|flag| flag == "vmx" || flag == "svm")
}

/// The tools without which no kernel is booted.
const TOOLS: &[&str] = &[
    "qemu-system-x86_64",
    "busybox",
    "cpio",
    "apt-get",
    "dpkg-deb",
];

/// The folder of a kernel: the distribution's, or another by these options of `fetch.sh`.
fn kernel(options: &[&str], package: Option<&str>) -> Option<PathBuf> {
    let fetched = Command::new(format!("{FOLDER}/fetch.sh"))
        .args(options)
        .arg(concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels"))
        .args(package)
        .output()
        .expect("fetch.sh runs");
    let path = String::from_utf8(fetched.stdout).expect("a path");
    if !fetched.status.success() {
        eprint!("{}", String::from_utf8_lossy(&fetched.stderr));
        skip("a kernel, by apt-get download");
        return None;
    }
    Some(path.trim_end().into())
}

/// A program of this package, compiled.
fn program(name: &str) -> String {
    let path = compiled(name, &[&format!("{name}.c")], &[]);
    path.display().to_string()
}

/// Version 2 of cgroups, which this machine may not have for memory: shares are of the least limit around memfold.
#[test]
fn a_share_is_of_what_version_2_of_cgroups_allows() {
    only_in_the_long_form!();
    alone!(TOOLS);
    let Some(kernel) = kernel(&[], None) else {
        return;
    };
    let output = Command::new(format!("{FOLDER}/run.sh"))
        .args(["--memory", "512M", "--seconds", "120"])
        .args(["--program", &memfold().display().to_string()])
        .args(["--program", &program("verify"), "--program", "unshare"])
        .arg(kernel)
        .arg(format!("{FOLDER}/cgroups.sh"))
        .output()
        .expect("run.sh runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert_eq!(text.matches("half of ").count(), 4, "{text}");
}

/// Containers there have a namespace of cgroups, and see nothing but their own.
#[test]
fn containers_are_held_on_version_2_of_cgroups() {
    only_in_the_long_form!();
    alone!(TOOLS);
    let Some(kernel) = kernel(&[], None) else {
        return;
    };
    run_tests_in(&kernel, CONTAINERS, &[("CGROUPS", "2")]);
}

/// Boots it, for `seconds` seconds at most.
fn boot(kernel: &PathBuf, seconds: u32, variables: &[(&str, &str)]) -> Output {
    let set = variables
        .iter()
        .flat_map(|(name, value)| ["--set".to_owned(), format!("{name}={value}")]);
    Command::new(format!("{FOLDER}/run.sh"))
        .args(["--host-root", "--memory", "4G"])
        .args(["--seconds", &seconds.to_string()])
        .args(["--set", &format!("BINARY={}", memfold().display())])
        .args(["--set", concat!("FOLDER=", env!("CARGO_MANIFEST_DIR"))])
        .args([
            "--set",
            &format!("CI={}", std::env::var("CI").unwrap_or_default()),
        ])
        .args(set)
        .arg(kernel)
        .arg(format!("{FOLDER}/programs.sh"))
        .output()
        .expect("run.sh runs")
}

/// Runs those of these tests that `filter` names, with further variables of `programs.sh`.
fn run_tests_in(kernel: &PathBuf, filter: &str, more: &[(&str, &str)]) {
    let tests = std::env::current_exe().expect("this program");
    let tests = tests.to_string_lossy();
    let variables = [&[("TESTS", &*tests), ("FILTER", filter)], more].concat();
    let output = boot(kernel, 1800, &variables);
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(!text.contains("running 0 tests"), "{text}");
    println!("{text}");
}

/// What a doctor found in a check.
fn found<'a>(doctor: &'a serde_json::Value, name: &str) -> &'a str {
    let checks = doctor["checks"].as_array().expect("checks");
    let check = checks.iter().find(|check| check["name"] == name);
    check.expect("a check")["found"].as_str().expect("a text")
}

/// The checks of a doctor that are not `ok`, by name.
fn missing(doctor: &serde_json::Value) -> Vec<&str> {
    let checks = doctor["checks"].as_array().expect("checks");
    let missing = checks.iter().filter(|check| check["verdict"] == "missing");
    missing
        .map(|check| check["name"].as_str().expect("a name"))
        .collect()
}

/// What runs on the distribution's kernel, in the long form of `.ci/long` and in the short one.
const PROGRAMS_LONG: &str = "alone::torture::pages_survive_m alone::torture::pages_survive_reclaim_alone \
    alone::torture::pages_survive_forks alone::redis alone::crash";
const PROGRAMS_SHORT: &str =
    "alone::torture::pages_survive_reclaim_alone alone::torture::pages_survive_mremap";

/// Debian 12's has no `UFFDIO_MOVE`, which `doctor` says, and pages are carried off.
#[test]
fn the_distributions_kernel_runs_programs_or_says_what_it_lacks() {
    only_in_the_long_form!();
    alone!(TOOLS);
    let Some(kernel) = kernel(&[], None) else {
        return;
    };
    let output = boot(&kernel, 60, &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    let (doctor, rest) = text.split_once("\ndoctor: ").expect("the doctor's status");
    let (release, doctor) = doctor.split_once('\n').expect("a release");
    let doctor: serde_json::Value = serde_json::from_str(doctor).expect(doctor);
    match &*missing(&doctor) {
        [] => {
            assert!(rest.contains("run: 0"), "{release}: {rest}");
            let way = found(&doctor, "userfaultfd-move");
            let moves = !release.starts_with("6.1.");
            assert!(way.contains("mremap") != moves, "{release}: {way}");
            let programs = if rounds() > 2 {
                PROGRAMS_LONG
            } else {
                PROGRAMS_SHORT
            };
            run_tests_in(&kernel, programs, &[]);
        }
        other => panic!("{release}: {other:?}: {text}"),
    }
}

#[test]
fn programs_run_on_other_kernels() {
    alone!(TOOLS);
    if rounds() <= 2 {
        println!("left out of all but .ci/long: it takes half an hour without KVM");
        return;
    }
    let kernels = [
        kernel(&["--suite", "bookworm-backports"], None),
        // The oldest that memfold runs on, of a distribution that still has it.
        kernel(
            &["--ubuntu", "--suite", "focal-updates"],
            Some("linux-image-5.14.0-1059-oem"),
        ),
    ];
    let programs = if has_kvm() {
        PROGRAMS
    } else {
        PROGRAMS_EMULATED
    };
    for kernel in kernels.into_iter().flatten() {
        run_tests_in(&kernel, programs, &[]);
    }
}
