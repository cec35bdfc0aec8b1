//! Docker and containerd themselves, with their default capabilities and seccomp profiles, which are in no file.  The image
//! is made of the programs under test.

use super::attached::go_heap;
use super::containers::{
    CONFINED, DEVICE, DEVICE_GROUP, IMAGE, REDIS_SAVES, assert_paged_out, assert_share,
    assert_tree_paged_out, device_option, printed, scripts, unpacked,
};
use crate::support::{STRANGER, Stage, compiled, find_program, skip};
use std::path::PathBuf;
use std::process::Command;

const TOOLS: [&str; 6] = ["busybox", "cc", "go", "redis-server", "setpriv", "unshare"];
/// As containerd names it.
const IMAGE_OF_CONTAINERD: &str = "docker.io/library/memfold-tests:latest";

/// A tree of forks, and a program of Go's linker, which has no loader and is attached by `ptrace`.
const HELD: &str = "cd /tmp && memfold run --resident 16M --stats tree -- forktree 24 count && \
     memfold run --resident 32M --stats go -- heap-go 64 3 && cat tree && echo --- && cat go";

/// An image, and the storage that has it.
struct Engines {
    stage: Stage,
    unpacked: PathBuf,
}

impl Engines {
    /// `None`, said loudly, where they were not fetched.
    fn new() -> Option<Engines> {
        let unpacked = unpacked();
        if !unpacked.join("engines").is_file() {
            skip("Docker and containerd (tests/containers/fetch.sh FOLDER engines)");
            return None;
        }
        let engines = Engines {
            stage: Stage::new(),
            unpacked,
        };
        engines.stage.folder("engines", 0o755);
        let found = ["redis-server", "redis-cli", "redis-check-rdb", "setpriv"].map(find_program);
        let mut programs: Vec<PathBuf> = found.into_iter().flatten().collect();
        programs.extend([engines.stage.memfold(), go_heap()]);
        programs.push(compiled("forktree", &["forktree.c"], &[]));
        let output = engines.script("image").args(programs).output();
        let output = output.expect("an image");
        assert!(output.status.success(), "{output:?}");
        Some(engines)
    }

    /// The script, to do one thing.
    fn script(&self, what: &str) -> Command {
        let mut command = Command::new(scripts().join("docker.sh"));
        command.arg(&self.unpacked).arg(what);
        command.arg(self.stage.path("engines"));
        command
    }

    /// Runs a shell script in a container, which must succeed with nothing unmanaged. Returns what it printed.
    fn succeeds(&self, engine: &str, options: &[&str], script: &str) -> String {
        let image = match engine {
            "containerd" => IMAGE_OF_CONTAINERD,
            _ => IMAGE,
        };
        let mut command = self.script(engine);
        command.args(options).args([image, "sh", "-c", script]);
        printed(&command.output().expect("a container"))
    }

    /// Both programs of [`HELD`] were right, and their pages were out and came back.
    fn assert_held(&self, engine: &str, options: &[&str], script: &str) {
        let out = self.succeeds(engine, options, script);
        assert!(out.contains("heap ok\n"), "{out}");
        let (tree, go) = out.split_once("---\n").expect("two statistics");
        assert_tree_paged_out(tree);
        assert_paged_out(go);
    }
}

#[test]
fn programs_are_held_in_dockers_and_containerds_containers() {
    only_in_the_long_form!();
    // Beside others the tree may be over before memfold, whose limit it exceeds then, gets a CPU.
    alone!(&TOOLS);
    let Some(engines) = Engines::new() else {
        return;
    };
    let user = format!("--user={STRANGER}:{STRANGER}");
    let group = format!("--group-add={DEVICE_GROUP}");
    let device = device_option(&engines.stage, DEVICE_GROUP, "660");
    engines.assert_held("docker", &[DEVICE], HELD);
    engines.assert_held("docker", &[&user, &group, &device], HELD);
    engines.assert_held("containerd", &[DEVICE], HELD);
    // The device is the container's own.
    let as_user = format!(
        "chmod 666 /dev/userfaultfd && exec /usr/bin/setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups sh -c '{HELD}'"
    );
    engines.assert_held("containerd", &[DEVICE], &as_user);
}

#[test]
fn redis_saves_in_the_background_in_dockers_and_containerds_containers() {
    only_in_the_long_form!();
    beside!(&TOOLS);
    let Some(engines) = Engines::new() else {
        return;
    };
    for engine in ["docker", "containerd"] {
        let out = engines.succeeds(engine, &[DEVICE], &format!("cd /tmp;{REDIS_SAVES}"));
        assert_paged_out(&out);
    }
    assert_share(|script| engines.succeeds("docker", &CONFINED, script));
}
