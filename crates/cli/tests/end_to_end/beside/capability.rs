//! A memfold with a file capability, which its user has not.

use crate::support::{STRANGER, Stage, compiled};
use std::process::{Command, Stdio};

const TOOLS: [&str; 3] = ["setpriv", "unshare", "setcap"];

fn prepared() -> Stage {
    let stage = Stage::new();
    stage.set_capability();
    stage
}

#[test]
fn a_program_has_its_whole_environment_and_no_capability() {
    beside!(&TOOLS);
    let stage = prepared();
    let variables = [
        "LD_LIBRARY_PATH=/no/such",
        "TMPDIR=/tmp",
        "GLIBC_TUNABLES=glibc.malloc.perturb=1",
        "LOCPATH=/no/locales",
        "MALLOC_ARENA_MAX=1",
    ];
    let output = stage.run_as_stranger(&format!(
        "env {} LD_PRELOAD=/no/such.so ./memfold run --limit 64M -- \
             sh -c 'env; grep ^Cap /proc/self/status'",
        variables.join(" ")
    ));
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    for variable in variables {
        assert!(
            text.lines().any(|line| line == variable),
            "{variable}: {text}"
        );
    }
    let preload = text.lines().find(|line| line.starts_with("LD_PRELOAD="));
    let preload = preload.expect("a list of preloads");
    assert!(preload.ends_with("libmemfold.so:/no/such.so"), "{preload}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        let line = text.lines().find(|line| line.starts_with(set));
        assert!(
            line.expect("the set").ends_with("\t0000000000000000"),
            "{text}"
        );
    }
}

/// It has no loader, so it would be attached, and runs as root.
#[test]
fn a_set_user_id_program_is_not_attached_by_the_capability() {
    beside!(&TOOLS);
    let stage = prepared();
    let program = compiled("naps", &["naps.c"], &["-static"]);
    stage.program(&program, "naps");
    stage.allow("naps", 0o4755);
    // It naps until memfold has named it.
    let output = stage.run(&format!(
        "setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups \
         ./memfold run --limit 64M --stats - -- sh -c './naps /tmp/go; true' 2> /tmp/errors & \
         while kill -0 $! && ! grep -q 'not under the limit' /tmp/errors; do sleep 0.05; done; \
         touch /tmp/go; wait $!; status=$?; cat /tmp/errors >&2; exit $status"
    ));
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    assert!(text.starts_with("effective user 0, threads 1\n"), "{text}");
    assert!(
        errors.contains("naps (PID ") && errors.contains("not under the limit"),
        "{errors}"
    );
    assert!(text.contains("\"processes_unmanaged\": 1"), "{text}");
}

#[test]
fn a_user_reaches_no_file_by_the_capability() {
    beside!(&TOOLS);
    let stage = prepared();
    // Any user may write into the inner folder, but none can reach it.
    stage.folder("closed", 0o700);
    let open = stage.folder("closed/open", 0o777);
    let mut sleeping = Command::new("sleep")
        .arg("60")
        .current_dir(&open)
        .stdin(Stdio::null())
        .spawn()
        .expect("sleep runs");
    let folder = format!("/proc/{}/cwd", sleeping.id());
    for option in [
        format!("--stats {folder}/run.json"),
        format!("--swap-size 1M --swap-file {folder}"),
    ] {
        let command = format!("./memfold run --limit 64M {option} -- echo started");
        let output = stage.run_as_stranger(&command);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{option}: {errors}");
        assert!(errors.contains("ermission denied"), "{option}: {errors}");
        assert!(output.stdout.is_empty(), "{option}");
    }
    let output = stage.run_as_stranger(&format!("./memfold run --limit 64M -- {folder}/x"));
    assert_eq!(output.status.code(), Some(126), "a program there");
    sleeping.kill().expect("it is killed");
    sleeping.wait().expect("it ends");
    assert_eq!(std::fs::read_dir(open).expect("the folder").count(), 0);
}

/// A program of the user's, its child, and what both hold.
const FORKS: &str = "
import hashlib, os
memory = bytearray(os.urandom(1 << 16)) * 800
digest = hashlib.sha256(memory).digest()
child = os.fork()
same = hashlib.sha256(memory).digest() == digest
if child == 0:
    os._exit(0 if same else 1)
print(same and os.waitpid(child, 0)[1] == 0)
";

#[test]
fn programs_and_their_children_are_managed_by_the_capability() {
    beside!(&[&TOOLS[..], &["python3"]].concat());
    let stage = prepared();
    std::fs::write(stage.path("forks.py"), FORKS).expect("a script");
    stage.allow("forks.py", 0o644);
    let command =
        "./memfold run --resident 20M --stats /dev/stderr --quiet -- /usr/bin/env python3 forks.py";
    let output = stage.run_as_stranger(command);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "True\n",
        "{errors}"
    );
    let start = errors.find('{').expect("statistics");
    let stats: serde_json::Value = serde_json::from_str(&errors[start..]).expect("JSON");
    assert!(stats["processes"].as_u64() >= Some(2), "{errors}");
    assert!(stats["pages_out"].as_u64() > Some(5000), "{errors}");
}

/// By a userfaultfd of its own, a program could have another one read than it is, with more rights.
#[test]
fn the_capability_reads_only_what_the_user_may_write() {
    beside!(&[&TOOLS[..], &["cc"]].concat());
    let stage = prepared();
    let program = crate::support::compiled("uninvited", &["uninvited.c"], &[]);
    stage.program(&program, "uninvited");
    for mode in ["sound", "foreign", "claim 32", "rubbish"] {
        let command = format!("./memfold run --resident 16M --quiet -- ./uninvited {mode}");
        let output = stage.run_as_stranger(&command);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{mode}: {errors}");
        let said = String::from_utf8_lossy(&output.stdout);
        let answer = ["not welcomed\n", "welcomed\n"][usize::from(mode == "sound")];
        assert_eq!(said, answer, "{mode}: {errors}");
    }
}

/// memfold could read it by the capability, and the user could not.
#[test]
fn what_executes_a_setuid_program_before_its_hello_is_not_read() {
    beside!(&[&TOOLS[..], &["cc"]].concat());
    let stage = prepared();
    let program = crate::support::compiled("uninvited", &["uninvited.c"], &[]);
    stage.program(&program, "uninvited");
    stage.program(&program, "trusted");
    stage.allow("trusted", 0o4755);
    let command = "./memfold run --resident 16M -- ./uninvited exchanged ./trusted";
    let output = stage.run_as_stranger(command);
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said, "not welcomed\nnothing was read\n", "{errors}");
    assert!(output.status.success(), "{errors}");
    assert!(
        !errors.contains("its helper"),
        "what it says is unsound: {errors}"
    );
}
