//! What a new user meets in the first hour, where no other test has it.

use crate::support::{OTHER, Stage, memfold};
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn statistics_to_a_dash_go_to_standard_output() {
    beside!(&["echo"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let output = Command::new(memfold())
        .args([
            "run",
            "--limit",
            "64M",
            "--stats",
            "-",
            "--",
            "echo",
            "of the program",
        ])
        .current_dir(folder.path())
        .output()
        .expect("memfold starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (program, stats) = text.split_once('\n').expect("two parts");
    assert_eq!(program, "of the program");
    let stats: serde_json::Value = serde_json::from_str(stats).expect("JSON");
    assert_eq!(stats["exit_code"], 0);
    let left = std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left, 0, "a file of that name");
}

#[test]
fn a_memfold_that_is_killed_leaves_no_part_of_its_statistics() {
    beside!(&["sleep"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let mut run = Command::new(memfold())
        .args([
            "run",
            "--limit",
            "64M",
            "--stats",
            "stats.json",
            "--",
            "sleep",
            "60",
        ])
        .current_dir(folder.path())
        .stderr(Stdio::null())
        .spawn()
        .expect("memfold starts");
    std::thread::sleep(Duration::from_millis(500));
    run.kill().expect("it is there");
    run.wait().expect("it ends");
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .expect("a folder")
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn all_that_a_host_lacks_is_told_at_once_with_its_remedies() {
    beside!(&["unshare", "setpriv", "mount"]);
    let stage = Stage::new();
    let script = format!(
        "chmod 600 /dev/userfaultfd; ulimit -n 20; unset GITHUB_ACTIONS GITLAB_CI SLURM_JOB_ID; setpriv --reuid {OTHER} --regid {OTHER} --clear-groups ./memfold run -- true"
    );
    let output = stage.run(&script);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(125), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    for part in ["descriptors: ", "ulimit -n", "To fix it: "] {
        assert!(errors.contains(part), "{part}: {errors}");
    }
    let allowed = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    if allowed.expect("the sysctl").trim() == "0" {
        // With how long the remedy lasts.
        for part in ["userfaultfd: ", "boot"] {
            assert!(errors.contains(part), "{part}: {errors}");
        }
    }
}
