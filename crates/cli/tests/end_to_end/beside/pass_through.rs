//! What a program sees and returns is its own: codes, signals, descriptors, environment.

use crate::support::{Limits, MIB, Program, compiled, copy_program, find_program, memfold};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

const LIMIT: Limits = Limits::Total(64 * MIB);

fn bare(arguments: &[&str]) -> Output {
    Command::new(memfold())
        .args(arguments)
        .output()
        .expect("memfold starts")
}

fn shell(script: &str) -> Program {
    Program::new("sh").args(["-c", script])
}

#[test]
fn exit_codes_are_the_programs_own() {
    beside!(&["sh"]);
    for code in [0, 1, 2, 42, 125, 126, 127, 255] {
        let outcome = shell(&format!("exit {code}")).run(LIMIT);
        assert_eq!(outcome.code(), code, "{}", outcome.errors);
        assert_eq!(outcome.number("exit_code"), f64::from(code));
    }
}

#[test]
fn ends_by_a_signal_are_shown_as_shells_do() {
    beside!(&["sh"]);
    for (name, number) in [
        ("KILL", 9),
        ("SEGV", 11),
        ("TERM", 15),
        ("ABRT", 6),
        ("INT", 2),
    ] {
        let outcome = shell(&format!("kill -{name} $$")).run(LIMIT);
        assert_eq!(outcome.code(), 128 + number, "{name}: {}", outcome.errors);
    }
}

#[test]
fn bad_usage_is_one_line_and_a_stable_code() {
    beside!(&[]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let plain = folder.path().join("plain");
    fs::write(&plain, "not a program").expect("a file");
    let plain = plain.to_str().expect("a plain path");
    let cases: &[(&[&str], i32)] = &[
        (&["run", "--limit", "nonsense", "--", "true"], 125),
        (&["run", "--limit", "-5M", "--", "true"], 125),
        (&["run", "--limit", "0", "--", "true"], 125),
        (&["run", "--limit", "4K", "--", "true"], 125),
        (&["run", "--limit", "99999999999999G", "--", "true"], 125),
        (&["run", "--limit", "101%", "--", "true"], 125),
        (&["run", "--resident", "1", "--", "true"], 125),
        (&["run", "--algo", "none-such", "--", "true"], 125),
        (&["run", "--no-such-option", "--", "true"], 125),
        (&["run"], 125),
        (
            &["run", "--stats", "/no/such/folder/file", "--", "true"],
            125,
        ),
        (&["run", "--", "/no/such/program"], 127),
        (&["run", "--", "no-such-program-anywhere"], 127),
        (&["run", "--", plain], 126),
        (&["run", "--", "/"], 126),
    ];
    for (arguments, code) in cases {
        let output = bare(arguments);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(*code), "{arguments:?}: {errors}");
        assert!(
            errors.contains("memfold"),
            "{arguments:?} says who is speaking: {errors:?}"
        );
        assert!(!errors.contains("panicked"), "{arguments:?}: {errors}");
        assert!(
            output.stdout.is_empty(),
            "{arguments:?} prints nothing to stdout"
        );
    }
}

#[test]
fn input_output_and_arguments_are_untouched() {
    beside!(&["cat", "sh"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("input");
    let bytes: Vec<u8> = (0..300_000_u32)
        .map(|number| (number * 31 % 251) as u8)
        .collect();
    fs::write(&file, &bytes).expect("a file");
    let outcome = Program::new("cat").input(&file).run(LIMIT);
    outcome.assert_success();
    assert!(outcome.output == bytes, "cat passes all bytes on");
    let odd = ["", " ", "--limit", "-- x", "a\nb", "\u{fc}", "$HOME", "*"];
    let outcome = shell("printf '<%s>' \"$@\"").arg("sh").args(odd).run(LIMIT);
    assert_eq!(outcome.text(), odd.map(|one| format!("<{one}>")).concat());
}

#[test]
fn the_environment_and_descriptors_are_as_without_memfold() {
    beside!(&["env", "ls", "sh"]);
    // What the agent needs to be loaded may show in the program's own environment
    // only where the dynamic loader has no other way; nothing else may.
    let seen = |limits| {
        let mut lines: Vec<String> = Program::new("env")
            .env("A", "b c")
            .run(limits)
            .text()
            .lines()
            .map(str::to_owned)
            .collect();
        lines.retain(|line| !line.starts_with("LD_PRELOAD=") && !line.starts_with("MEMFOLD"));
        lines.sort();
        lines
    };
    assert_eq!(seen(LIMIT), seen(Limits::None));
    let descriptors = shell("ls /proc/self/fd | wc -l");
    assert_eq!(
        descriptors.run(LIMIT).text(),
        descriptors.run(Limits::None).text()
    );
    let preloaded = Program::new("env").env("LD_PRELOAD", "/no/such/library.so");
    preloaded.run(LIMIT).assert_success();
}

/// As systemd has it: the variables name the process that it started, which is memfold.
#[test]
fn descriptors_and_the_watchdog_of_a_unit_are_the_programs() {
    beside!(&["sh"]);
    let unit = "export LISTEN_PID=$$ WATCHDOG_PID=$$ SYSTEMD_EXEC_PID=$$; \
                LISTEN_FDS=1 LISTEN_PIDFDID=1 exec \"$0\" run --limit 64M -- sh -c \"$1\" 3<\"$2\"";
    let program = "for pid in $LISTEN_PID $WATCHDOG_PID $SYSTEMD_EXEC_PID; do [ $pid = $$ ] && echo own; done; \
                   echo $LISTEN_FDS ${LISTEN_PIDFDID-unset}; cat <&3";
    let folder = tempfile::tempdir().expect("a temporary directory");
    let given = folder.path().join("given");
    fs::write(&given, "through 3\n").expect("a file");
    let output = Command::new("sh")
        .args(["-c", unit])
        .args([memfold(), Path::new(program), &given])
        .output()
        .expect("sh starts");
    let (seen, errors) = (output.stdout, String::from_utf8_lossy(&output.stderr));
    let seen = String::from_utf8_lossy(&seen);
    assert_eq!(seen, "own\nown\nown\n1 unset\nthrough 3\n", "{errors}");
    // What is another's stays.
    let outcome = shell("echo $LISTEN_PID").env("LISTEN_PID", "1").run(LIMIT);
    assert_eq!(outcome.text(), "1\n");
}

#[test]
fn an_empty_environment_is_no_obstacle() {
    beside!(&["env"]);
    let verify = compiled("verify", &["verify.c"], &[]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let result = folder.path().join("result");
    let env = find_program("env").expect("env");
    // Started with an empty environment itself.
    let outcome = Program::new(&verify)
        .args(["64", "4"])
        .arg(&result)
        .empty_environment()
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    outcome.assert_swapped(64 * MIB);
    // Executed from a program that empties it: memfold may lose such a program, which
    // must then run untouched, or keep it; in both cases it is right.
    let outcome = Program::new(env)
        .arg("-i")
        .arg(&verify)
        .args(["64", "4"])
        .arg(&result)
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "....");
}

#[test]
fn a_static_program_runs_untouched() {
    beside!(&["cc"]);
    let program = compiled("verify-static", &["verify.c"], &["-static"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let outcome = Program::new(program)
        .args(["64", "4"])
        .arg(folder.path().join("result"))
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "....");
    // Executed by a managed program as well.
    let program = compiled("verify-static", &["verify.c"], &["-static"]);
    let outcome = shell("\"$0\" 8 2 \"$1\"; echo $?")
        .arg(program)
        .arg(folder.path().join("result"))
        .run(LIMIT);
    assert_eq!(outcome.text(), "..0\n");
}

/// A program as another user executes it. The build folder may be mounted without setuid or closed to
/// other users: it is copied to `folder`, with that mode.
fn as_another_user(program: &Path, mode: u32, folder: &Path) -> Program {
    let allow = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("permissions");
    };
    allow(folder, 0o755);
    let copy = folder.join("program");
    copy_program(program, &copy);
    allow(&copy, mode);
    Program::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(copy)
}

#[test]
fn a_setuid_program_runs_untouched() {
    beside!(&["cc", "setpriv"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let program = compiled("verify", &["verify.c"], &[]);
    let outcome = as_another_user(&program, 0o4755, folder.path())
        .args(["16", "3"])
        .arg(folder.path().join("result"))
        .run(LIMIT);
    outcome.assert_success();
    assert_eq!(outcome.text(), "...");
}

/// As services do that start as root.
#[test]
fn a_program_that_becomes_another_user_is_held() {
    beside!(&["cc", "setpriv"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let program = compiled("forktree", &["forktree.c"], &[]);
    let outcome = as_another_user(&program, 0o755, folder.path())
        .arg("32")
        .run(Limits::Resident(16 * MIB));
    outcome.assert_success();
    assert_eq!(outcome.text(), "forktree ok: 3 levels, 2 orphans\n");
    outcome.assert_swapped(32 * MIB);
    assert_eq!(
        outcome.number("processes_unmanaged"),
        0.0,
        "{}",
        outcome.errors
    );
}

#[test]
fn the_binary_works_when_copied_elsewhere_alone() {
    beside!(&["cc"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let copy = folder.path().join("renamed");
    copy_program(memfold(), &copy);
    let stats = folder.path().join("stats");
    let output = Command::new(&copy)
        .args(["run", "--resident", "16M", "--stats"])
        .arg(&stats)
        .arg("--")
        .arg(compiled("verify", &["verify.c"], &[]))
        .args(["64", "4"])
        .arg(folder.path().join("result"))
        .env_clear()
        .current_dir("/")
        .output()
        .expect("the copy starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(output.stdout, b"....");
    assert_statistics_are_of_a_run(&stats);
}

/// They are one JSON object, and those that only a run produces agree.
fn assert_statistics_are_of_a_run(file: &Path) {
    let text = fs::read_to_string(file).expect("the statistics");
    let stats: serde_json::Value = serde_json::from_str(&text).expect("one JSON object");
    assert_eq!(stats["resident_limit_bytes"], 16 * MIB);
    let number = |name: &str| stats[name].as_f64().expect("a number");
    for name in ["wall_seconds", "cpu_seconds", "processes", "pages_out"] {
        assert!(number(name) > 0.0, "{name}: {text}");
    }
    assert!(
        stats["fault_ns"]["p50"].as_f64() > Some(0.0),
        "fault_ns.p50: {text}"
    );
    assert!(
        number("pages_out") * 4096.0 >= number("bytes_original") * 0.5,
        "{text}"
    );
    assert!(number("bytes_stored") <= number("bytes_original"), "{text}");
    assert!(
        number("faults_swap_in") <= number("pages_in") + number("faults_cache") + 1.0,
        "{text}"
    );
}
