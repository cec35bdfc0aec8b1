//! `--stats` where the path is that of an open descriptor, or of a file with a mode of its own.

use crate::support::{memfold, said_but_of_the_kernel};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

/// A shell in `folder`, for which `$M` is memfold.
fn shell(folder: &Path, script: &str) {
    let status = Command::new("sh")
        .args(["-c", script])
        .env("M", memfold())
        .current_dir(folder)
        .status()
        .expect("sh runs");
    assert!(status.success(), "{script}: {status}");
}

#[test]
fn what_a_program_wrote_stays_where_its_statistics_go() {
    beside!(&["sh"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let folder = folder.path();
    symlink("/proc/self/fd/1", folder.join("link")).expect("a link");
    for path in [
        "/dev/stdout",
        "/dev/fd/1",
        "/proc/self/fd/1",
        "link",
        "log",
        "-",
    ] {
        let run = format!("\"$M\" run --limit 64M --stats {path} -- echo program");
        shell(folder, &format!("echo before > log; {run} >> log"));
        let text = fs::read_to_string(folder.join("log")).expect("the log");
        assert!(text.starts_with("before\nprogram\n{"), "{path}: {text}");
        assert!(text.contains("exit_code"), "{path}: {text}");
        shell(folder, &format!("{run} > log; echo behind >> log"));
        let text = fs::read_to_string(folder.join("log")).expect("the log");
        assert!(text.starts_with("program\n{"), "{path}: {text}");
        assert!(text.ends_with("}\nbehind\n"), "{path}: {text}");
    }
    let run = "\"$M\" run --limit 64M --stats /dev/stderr -- sh -c 'echo errors >&2' 2> log";
    shell(folder, run);
    let text = fs::read_to_string(folder.join("log")).expect("the log");
    let said = said_but_of_the_kernel(&text).join("\n");
    assert!(said.starts_with("errors\n{"), "{text}");
    // The file has no name any more. The link stays one.
    shell(
        folder,
        "exec 3< log > log; rm log; \"$M\" run --limit 64M --stats link -- echo program; \
         exec 3< /proc/self/fd/1; cat <&3 > copy",
    );
    let text = fs::read_to_string(folder.join("copy")).expect("the copy");
    assert!(text.starts_with("program\n{"), "{text}");
    let link = fs::symlink_metadata(folder.join("link")).expect("the link");
    assert!(link.is_symlink());
}

#[test]
fn a_file_of_statistics_keeps_its_mode_and_owner() {
    beside!(&["sh"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("run.json");
    fs::write(&file, "old").expect("a file");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("its mode");
    std::os::unix::fs::chown(&file, Some(65533), Some(65532)).expect("its owner");
    shell(
        folder.path(),
        "\"$M\" run --limit 64M --stats run.json -- true",
    );
    let found = fs::metadata(&file).expect("the file");
    let owner = (found.uid(), found.gid());
    assert_eq!((found.mode() & 0o7777, owner), (0o600, (65533, 65532)));
    assert!(fs::read_to_string(&file).expect("it").contains("exit_code"));
    let names = fs::read_dir(folder.path()).expect("the folder").count();
    assert_eq!(names, 1, "nothing else is there");
}
