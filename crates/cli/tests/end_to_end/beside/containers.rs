//! Containers with the default capabilities and seccomp profile of Docker and Podman, and /dev/userfaultfd.

use super::attached::go_heap;
use crate::support::{STRANGER, Stage, compiled, find_program, skip};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const TOOLS: [&str; 4] = ["cc", "crun", "python3", "unshare"];

/// 60 MB of values, of which 24 may be resident. What was saved is read by redis' own checker.
pub(super) const REDIS_SAVES: &str = "
    ask() { redis-cli -s /tmp/redis.sock \"$@\"; }
    memfold run --resident 24M --stats - -- redis-server --port 0 --unixsocket /tmp/redis.sock --save '' \
        --enable-debug-command yes --daemonize no > /tmp/log &
    until ask ping > /tmp/answer 2>&1 && grep -q PONG /tmp/answer; do sleep 0.1; done
    ask debug populate 60000 key 1000 && digest=\"$(ask debug digest)\" && ask bgsave || exit 1
    until ask info persistence | grep -q 'rdb_bgsave_in_progress:0'; do sleep 0.1; done
    ask info persistence | grep -q 'rdb_last_bgsave_status:ok' || exit 2
    redis-check-rdb /tmp/dump.rdb | grep -q '60000 keys read' || exit 3
    [ \"$(ask debug digest)\" = \"$digest\" ] || exit 4
    ask shutdown nosave; wait; sed -n '/^{/,$p' /tmp/log";

/// What `podman.sh` and `docker.sh` call their image.
pub(super) const IMAGE: &str = "memfold-tests";
pub(super) const DEVICE: &str = "--device=/dev/userfaultfd";
/// Of the device, in some tests.
pub(super) const DEVICE_GROUP: u32 = 4711;

/// A container of Docker or Podman with little memory that cannot be written to and has no rights.
pub(super) const CONFINED: [&str; 6] = [
    DEVICE,
    "--memory=160m",
    "--read-only",
    "--tmpfs=/run:exec,mode=755",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
];

/// In 160 MiB.
const SHARE: &str = "memfold run --limit 50% --stats - -- true";

/// A share is of the memory of the container, in which `succeeds` runs a script.
pub(super) fn assert_share(succeeds: impl FnOnce(&str) -> String) {
    let out = succeeds(SHARE);
    assert_eq!(number(&out, "limit_bytes"), 80 << 20, "{out}");
}

/// The option of Docker and Podman that gives a container a device of this group and mode.
pub(super) fn device_option(stage: &Stage, group: u32, mode: &str) -> String {
    let node = stage.path(&format!("userfaultfd-{group}"));
    let made = Command::new("sh")
        .args([
            "-ec",
            "cp -a /dev/userfaultfd \"$1\"; chgrp \"$2\" \"$1\"; chmod \"$3\" \"$1\"",
            "sh",
        ])
        .arg(&node)
        .args([&group.to_string(), mode])
        .status();
    assert!(made.is_ok_and(|status| status.success()), "no device");
    format!("--device={}:/dev/userfaultfd", node.display())
}

/// `tests/containers`, of the repository.
pub(super) fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/containers")
}

/// What `tests/containers/fetch.sh` has unpacked, if it was called.
pub(super) fn unpacked() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("containers")
}

/// The seccomp profile of containers-common: installed, or unpacked by `tests/containers/fetch.sh`.
fn profile() -> Option<PathBuf> {
    let unpacked = unpacked();
    let roots = [unpacked.as_path(), Path::new("/")];
    let profiles = roots.map(|root| root.join("usr/share/containers/seccomp.json"));
    let found = profiles.into_iter().find(|profile| profile.is_file());
    if found.is_none() {
        skip("the seccomp profile of containers-common (tests/containers/fetch.sh)");
    }
    found
}

/// Runs a shell script in a container, in which `memfold` is the one under test.
fn in_container(stage: &Stage, profile: &Path, options: &[&str], script: &str) -> Output {
    let folder = stage.path("");
    let script = format!(
        "cd /tmp && memfold() {{ {}/memfold \"$@\"; }}; {script}",
        folder.display()
    );
    Command::new(scripts().join("run.sh"))
        .arg(profile)
        .args(options)
        .args(["--", "sh", "-c", &script])
        .env_remove("XDG_RUNTIME_DIR")
        .output()
        .expect("a container")
}

/// The same; it must succeed.
fn succeeds(stage: &Stage, profile: &Path, options: &[&str], script: &str) -> String {
    printed(&in_container(stage, profile, options, script))
}

/// What a container printed, which must have succeeded with nothing unmanaged.
pub(super) fn printed(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}: {out}{errors}", output.status);
    assert!(!errors.contains("unmanaged"), "{errors}");
    out
}

/// Of the statistics as JSON, which end the output.
pub(super) fn number(out: &str, name: &str) -> u64 {
    let json = out.rfind("\n{").map_or(out, |start| &out[start..]);
    let statistics: serde_json::Value = serde_json::from_str(json).expect("statistics");
    statistics[name].as_u64().expect("a number")
}

/// All programs were held, and their pages were out and came back.
pub(super) fn assert_paged_out(out: &str) {
    assert!(
        number(out, "pages_in") > 1000,
        "hardly anything was out: {out}"
    );
    assert_eq!(number(out, "processes_unmanaged"), 0, "{out}");
}

/// A tree of forks ended well, and had paged out what its descendants had written themselves, not only what they
/// inherited.
pub(super) fn assert_tree_paged_out(out: &str) {
    assert!(out.contains("forktree ok: 3 levels, 2 orphans\n"), "{out}");
    let mut lines = out.lines();
    let pages = lines.find_map(|line| line.strip_suffix(" pages that descendants wrote were out"));
    let pages: u64 = pages.and_then(|pages| pages.parse().ok()).expect(out);
    assert!(pages > 1000, "{out}");
    assert_paged_out(out);
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_tree_of_forks_is_managed_in_a_default_container() {
    beside!(&TOOLS);
    let (stage, Some(profile)) = (Stage::new(), profile()) else {
        return;
    };
    let dynamic = compiled("forktree", &["forktree.c"], &[]);
    let dynamic = stage.program(&dynamic, "forktree");
    let fixed = compiled("forktree-static", &["forktree.c"], &["-static"]);
    let fixed = stage.program(&fixed, "forktree-static");
    let (user, group) = (STRANGER.to_string(), DEVICE_GROUP.to_string());
    // The device of a group: no more than a pod of the standard `restricted` has.
    let user = ["--user", &user, "--group", &group];
    for (options, program) in [
        (&user[..2], &dynamic),
        (&[], &dynamic),
        (&user, &dynamic),
        (&user, &fixed),
    ] {
        let script = format!(
            "memfold doctor && memfold run --resident 16M --stats - -- {} 24 count",
            program.display()
        );
        let out = succeeds(&stage, &profile, options, &script);
        assert!(out.contains("prepared by the programs' library"), "{out}");
        assert_tree_paged_out(&out);
    }
}

/// It has no loader, and is attached by `ptrace`, as its own user.
#[test]
fn a_go_program_is_held_in_a_default_container() {
    beside!(&["crun", "go", "python3", "unshare"]);
    let (stage, Some(profile)) = (Stage::new(), profile()) else {
        return;
    };
    let heap = stage.program(&go_heap(), "heap");
    let script = format!(
        "memfold run --resident 32M --stats - -- {} 64 3",
        heap.display()
    );
    let user = STRANGER.to_string();
    for options in [&["--user", &user][..], &[]] {
        let out = succeeds(&stage, &profile, options, &script);
        assert!(out.contains("heap ok\n"), "{out}");
        assert_paged_out(&out);
    }
}

#[test]
fn the_containers_memory_is_what_a_share_is_of() {
    beside!(&TOOLS);
    let (stage, Some(profile)) = (Stage::new(), profile()) else {
        return;
    };
    let bytes = (160u64 << 20).to_string();
    assert_share(|script| succeeds(&stage, &profile, &["--memory", &bytes], script));
}

#[test]
fn redis_saves_in_the_background_in_a_default_container() {
    beside!(&TOOLS);
    if find_program("redis-server").is_none() {
        skip("redis-server");
        return;
    }
    let (stage, Some(profile)) = (Stage::new(), profile()) else {
        return;
    };
    let out = succeeds(&stage, &profile, &[], REDIS_SAVES);
    assert_paged_out(&out);
}

/// As pods with a read-only root filesystem have it: the kubelet makes a volume of kind emptyDir for all users to write,
/// without the sticky bit; mounted by subPath, only the folder in it counts.
#[test]
fn a_folder_of_a_pods_volume_holds_runs_and_the_volume_does_not() {
    beside!(&["unshare", "setpriv", "mount"]);
    let stage = Stage::new();
    let volume = stage.folder("volume", 0o777);
    let folder = stage.folder("runtime", 0o755);
    let doctor =
        format!("setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups ./memfold doctor");
    let script = format!(
        "setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups mkdir -p -m 700 volume/run && \
         mount -t tmpfs -o mode=777 none /tmp && mount -t tmpfs -o noexec none /dev/shm && \
         mount --bind /var/tmp /var/tmp && mount -o remount,bind,ro /var/tmp && \
         mount --bind volume/run runtime; \
         export KUBERNETES_SERVICE_HOST=10.0.0.1; TMPDIR={} {doctor}; XDG_RUNTIME_DIR={} {doctor}",
        volume.display(),
        folder.display(),
    );
    let output = stage.run(&script);
    let text = String::from_utf8_lossy(&output.stdout);
    let checks: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("runtime-folder"))
        .collect();
    let (refused, taken) = (checks[0], checks[1]);
    assert!(refused.contains("can be written by other users"), "{text}");
    assert!(taken.contains(&*folder.display().to_string()), "{text}");
    assert!(text.contains("subPath"), "{text}");
}
