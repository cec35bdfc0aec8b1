//! What memfold says: the summary, mistakes on the command line, notes, the environment, completions.

use crate::support::{Limits, MIB, Program, memfold, python, said_but_of_the_kernel};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

fn bare(arguments: &[&str]) -> (Output, String) {
    let output = Command::new(memfold())
        .args(arguments)
        .output()
        .expect("memfold starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, errors)
}

/// Two rounds over 100 MiB that compress well.
const ROUNDS: &str = "\
b = bytearray(100 << 20)
for round in range(3):
    for at in range(0, len(b), 4096):
        b[at] = (b[at] + 1) & 255
";

#[test]
fn the_summary_says_what_was_needed_and_what_it_cost() {
    beside!(&["python3"]);
    let program = Program::new(python()).args(["-c", ROUNDS]);
    let outcome = program.run(Limits::Total(64 * MIB));
    outcome.assert_success();
    let errors = &outcome.errors;
    assert!(
        errors.contains("needed 1") && errors.contains("the limit of 64.0 MiB was kept"),
        "{errors}"
    );
    assert!(
        errors.contains("% of the time was spent on swapping"),
        "{errors}"
    );
    let needed = outcome.number("peak_needed_bytes") as u64;
    assert!((100 * MIB..125 * MIB).contains(&needed), "{needed}");
    assert!(outcome.number("swapping_share") > 0.05, "{errors}");
    assert!(errors.contains("; --limit 1"), "{errors}");
    let quiet = program
        .memfold_options(["--summary", "never"])
        .run(Limits::Total(64 * MIB));
    assert!(said_but_of_the_kernel(&quiet.errors).is_empty());
}

#[test]
fn below_the_limit_it_is_silent_unless_asked() {
    beside!(&[]);
    let (_, errors) = bare(&["run", "--limit", "64M", "--", "true"]);
    assert!(said_but_of_the_kernel(&errors).is_empty(), "{errors}");
    for option in ["-v", "--summary=always"] {
        let (_, errors) = bare(&["run", "--limit", "64M", option, "--", "true"]);
        assert!(
            errors.contains("the limit of 64.0 MiB was kept"),
            "{option}: {errors}"
        );
    }
}

/// Memory that cannot be paged out, beyond the limit.
const LOCKED: &str = "\
import ctypes, mmap, time
m = mmap.mmap(-1, 60 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
b = (ctypes.c_char * len(m)).from_buffer(m)
if ctypes.CDLL(None, use_errno=True).mlock(ctypes.byref(b), ctypes.c_size_t(len(m))):
    raise OSError(ctypes.get_errno())
time.sleep(0.5)
";

#[test]
fn a_limit_that_is_not_kept_is_said_at_once_and_at_the_end() {
    beside!(&["python3"]);
    let program = Program::new(python()).args(["-c", LOCKED]);
    let outcome = program.run(Limits::Total(32 * MIB));
    outcome.assert_success();
    let errors = &outcome.errors;
    assert_eq!(
        errors.matches("the limit is exceeded by").count(),
        1,
        "{errors}"
    );
    assert!(
        errors.contains("the limit of 32.0 MiB was NOT kept: "),
        "{errors}"
    );
    let stats = outcome.stats.as_ref().expect("statistics");
    assert_eq!(stats["limit_kept"], false);
    assert_eq!(stats["exceeded_limit_bytes"], 32 * MIB);
    assert!(outcome.number("over_limit_ns") > 2e8, "{stats}");
    assert!(
        outcome.number("over_limit_pages") * 4096.0 > 25.0 * MIB as f64,
        "{stats}"
    );
}

/// Beside a total limit that is far away, and though reclaim aims at more as memory is locked.
#[test]
fn a_resident_limit_that_is_not_kept_is_named_as_it_was_given() {
    beside!(&["python3"]);
    let program = || Program::new(python()).args(["-c", LOCKED]);
    let alone = program().run(Limits::Resident(16 * MIB));
    let total = program().memfold_options(["--limit", "8G"]);
    let beside = total.run(Limits::Resident(16 * MIB));
    for outcome in [alone, beside] {
        outcome.assert_success();
        let stats = outcome.stats.as_ref().expect("statistics");
        assert_eq!(stats["limit_kept"], false, "{stats}");
        assert_eq!(stats["exceeded_limit_bytes"], 16 * MIB, "{stats}");
        assert_eq!(stats["resident_limit_bytes"], 16 * MIB, "{stats}");
        assert!(
            outcome.errors.contains("limit of 16.0 MiB was NOT kept: "),
            "{}",
            outcome.errors
        );
    }
}

/// Shared memory of 120 MiB.
const SHARED: &str = "\
import mmap, time
m = mmap.mmap(-1, 120 << 20)
for at in range(0, len(m), 4096):
    m[at] = 1
time.sleep(0.3)
";

#[test]
fn memory_that_is_not_managed_is_shown_beside_it() {
    beside!(&["python3"]);
    let program = Program::new(python()).args(["-c", SHARED]);
    let run = program.start(Limits::Total(64 * MIB));
    let outcome = run.wait();
    assert!(
        outcome.errors.contains("not under the limit: 1")
            && outcome.errors.contains("of mapped and shared memory"),
        "{}",
        outcome.errors
    );
    assert!(outcome.number("peak_mapped_bytes") > 119.0 * MIB as f64);
}

#[test]
fn mistakes_come_with_what_is_meant() {
    beside!(&["ls"]);
    for (arguments, part) in [
        (
            &["run", "--limt", "1G", "--", "true"][..],
            "did you mean --limit?",
        ),
        (
            &["run", "--limt", "1G", "--", "true"],
            "see memfold run --help",
        ),
        (&["ls", "-l"], "memfold run -- ls -l"),
        (&["--limit", "1G", "--", "true"], "memfold run --limit"),
        (&["run", "--stats-fd", "77", "--", "true"], "77>run.json"),
        (&["run", "--stats-fd=-1", "--", "true"], "--stats-fd"),
    ] {
        let (output, errors) = bare(arguments);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}");
        assert!(
            errors.contains(part) && errors.lines().count() == 1,
            "{errors}"
        );
    }
    let (output, _) = bare(&["help", "run"]);
    assert!(output.status.success());
    let help = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        help.contains("MEMFOLD_LIMIT") && help.contains("--summary"),
        "{help}"
    );
    let (output, _) = bare(&["-V"]);
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        version.contains("commit ") && version.contains("Linux 5.14"),
        "{version}"
    );
}

#[test]
fn limits_that_cannot_be_meant_are_noted_and_taken() {
    beside!(&[]);
    for (arguments, part) in [
        (&["--limit", "100T"][..], "more than this host"),
        (&["--resident", "100M", "--limit", "50M"], "has no effect"),
    ] {
        let line = [&["run"][..], arguments, &["--", "true"]].concat();
        let (output, errors) = bare(&line);
        assert!(output.status.success());
        assert!(
            errors.contains(part) && said_but_of_the_kernel(&errors).len() == 1,
            "{errors}"
        );
    }
}

#[test]
fn options_come_from_the_environment_too() {
    beside!(&["sh"]);
    let run = |arguments: &[&str], variables: &[(&str, &str)]| {
        let output = Command::new(memfold())
            .args(["run", "--stats", "/dev/stdout"])
            .args(arguments)
            .args(["--", "true"])
            .envs(variables.iter().copied())
            .output()
            .expect("memfold starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        serde_json::from_str::<serde_json::Value>(&text).ok()
    };
    let stats = run(&[], &[("MEMFOLD_LIMIT", "64MB"), ("MEMFOLD_NAME", "x")]).expect("JSON");
    assert_eq!(stats["limit_bytes"], 64 * MIB);
    assert_eq!(stats["name"], "x");
    let stats = run(&["--limit", "32M"], &[("MEMFOLD_LIMIT", "64M")]).expect("JSON");
    assert_eq!(stats["limit_bytes"], 32 * MIB);
    assert_eq!(run(&[], &[("MEMFOLD_LIMIT", "lots")]), None);
}

#[test]
fn an_option_overrides_the_variable_of_one_that_it_excludes() {
    beside!(&[]);
    let errors = |option: &str, variable: &str, value: &str| {
        let output = Command::new(memfold())
            .args(["run", "--limit", "64M", option, "--", "true"])
            .env(variable, value)
            .output()
            .expect("memfold starts");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for value in ["1", "0", ""] {
        let text = errors("-v", "MEMFOLD_QUIET", value);
        assert!(text.contains("the limit of 64.0 MiB was kept"), "{text}");
        assert_eq!(errors("-q", "MEMFOLD_VERBOSE", value), "");
    }
    let text = errors("--stats-fd=2", "MEMFOLD_STATS", "/no/such/folder/stats");
    assert!(text.contains("\"exit_code\""), "{text}");
    let text = errors("--stats=/dev/stderr", "MEMFOLD_STATS_FD", "77");
    assert!(text.contains("\"exit_code\""), "{text}");
    let text = errors("-q", "MEMFOLD_LIMIT", "64M");
    assert_eq!(text, "");
    for variable in ["MEMFOLD_LIMIT", "MEMFOLD_STATS", "MEMFOLD_REMOTE"] {
        assert_eq!(
            errors("-q", variable, ""),
            "",
            "{variable} counts as not set"
        );
    }
    let text = errors("-q", "MEMFOLD_RESIDENT", "lots");
    assert!(
        text.starts_with("memfold: MEMFOLD_RESIDENT: ") && text.lines().count() == 1,
        "{text}"
    );
}

#[test]
fn statistics_go_to_a_descriptor_that_the_program_does_not_get() {
    beside!(&["sh", "ls"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let script = "MEMFOLD_STATS_FD=7 \"$M\" run --limit 64M -- sh -c 'ls /proc/self/fd; env' 7> stats > seen";
    let status = Command::new("sh")
        .args(["-c", script])
        .env("M", memfold())
        .current_dir(folder.path())
        .status()
        .expect("sh runs");
    assert!(status.success());
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).expect("a file");
    assert!(!read("seen").lines().any(|number| number == "7"));
    // It would be another file's number for a run in this one.
    assert!(!read("seen").contains("MEMFOLD_STATS_FD"));
    let stats: serde_json::Value = serde_json::from_str(&read("stats")).expect("JSON");
    assert_eq!(stats["exit_code"], 0);
}

#[test]
fn a_missing_interpreter_is_named() {
    beside!(&[]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let script = folder.path().join("script");
    fs::write(&script, "#!/no/such/interpreter\n").expect("a file");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("its mode");
    let (output, errors) = bare(&["run", "--", script.to_str().expect("a plain path")]);
    assert_eq!(output.status.code(), Some(127));
    assert!(
        errors.contains("its interpreter /no/such/interpreter does not exist"),
        "{errors}"
    );
}

#[test]
fn a_failure_that_cannot_be_printed_has_its_status_all_the_same() {
    beside!(&[]);
    for (arguments, status) in [
        (&["run", "--", "no-such-program"][..], 127),
        (&["run", "--bad"], 125),
        (&["stat", "1"], 1),
    ] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full");
        let ended = Command::new(memfold())
            .args(arguments)
            .stderr(full.expect("/dev/full"))
            .status()
            .expect("memfold starts");
        assert_eq!(ended.code(), Some(status), "{arguments:?}: {ended}");
    }
}

#[test]
fn a_variable_named_as_that_of_completions_is_the_programs() {
    beside!(&["sh"]);
    let memfold = |complete: &str, arguments: &[&str]| {
        let output = Command::new(memfold())
            .args(arguments)
            .env("COMPLETE", complete)
            .output()
            .expect("memfold starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), text)
    };
    for value in ["bash", "1", ""] {
        let script = "echo $COMPLETE; exit 3";
        let run = ["run", "--limit", "64M", "--", "sh", "-c", script];
        assert_eq!(memfold(value, &run), (Some(3), format!("{value}\n")));
    }
    let (status, _) = memfold("1", &["--", "memfold", "li"]);
    assert_eq!(status, Some(125), "no such shell");
}

/// Completes a line until one of the words is as expected: a run on a busy machine does not always answer in time.
#[track_caller]
pub(super) fn completes_in_time(
    line: &str,
    complete: impl Fn(&str) -> String,
    is_expected: impl Fn(&str) -> bool,
) {
    let began = Instant::now();
    loop {
        let found = complete(line);
        if found.lines().any(&is_expected) {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{line}: {found}");
    }
}

#[test]
fn shells_complete_commands_and_runs() {
    beside!(&["bash", "sleep"]);
    let complete = |line: &str| {
        let words = line.split(' ').count();
        let script = format!(
            "source <(\"$M\" completions bash); COMP_WORDS=({line}); [[ '{line}' == *' ' ]] && COMP_WORDS+=(''); \
             COMP_CWORD={}; memfold() {{ \"$M\" \"$@\"; }}; \
             _clap_complete_memfold memfold \"${{COMP_WORDS[COMP_CWORD]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            words - 1
        );
        let output = Command::new("bash")
            .args(["-c", &script])
            .env("M", memfold())
            .output()
            .expect("bash runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let has = |line: &str, word: &str| complete(line).lines().any(|one| one.trim() == word);
    assert!(
        has("memfold run --lim", "--limit"),
        "{}",
        complete("memfold run --lim")
    );
    assert!(
        has("memfold run -- slee", "sleep"),
        "{}",
        complete("memfold run -- slee")
    );
    assert!(
        has("memfold run slee", "sleep"),
        "{}",
        complete("memfold run slee")
    );
    let run = Program::new("sleep")
        .arg("600")
        .start(Limits::Total(64 * MIB));
    run.statistics();
    let pid = run.root().to_string();
    for line in ["memfold limit ", "memfold stat ", "memfold reclaim "] {
        completes_in_time(line, complete, |one| one.starts_with(&pid));
    }
    run.terminate().assert_terminated();
}
