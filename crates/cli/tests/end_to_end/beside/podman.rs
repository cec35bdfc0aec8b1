//! Podman itself, with its default capabilities and seccomp profile. The image is made of the programs under test.

use super::containers::{
    CONFINED, DEVICE, DEVICE_GROUP, IMAGE, REDIS_SAVES, assert_paged_out, assert_share,
    assert_tree_paged_out, device_option, number, printed, scripts,
};
use crate::support::{OTHER, STRANGER, Stage, compiled, find_program, skip};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

const TOOLS: [&str; 5] = ["cc", "busybox", "crun", "podman", "unshare"];

/// An image, and the storage that has it.
struct Podman {
    stage: Stage,
    /// Whose Podman it is, if not root's.
    rootless: Option<u32>,
}

impl Podman {
    fn with(programs: &[&Path]) -> Podman {
        Podman::of(None, programs)
    }

    fn of(rootless: Option<u32>, programs: &[&Path]) -> Podman {
        let stage = Stage::new();
        stage.folder("podman", 0o755);
        stage.folder("printed", 0o755);
        let podman = Podman { stage, rootless };
        let memfold = podman.stage.memfold();
        let output = podman.script("image").arg(memfold).args(programs).output();
        let output = output.expect("an image");
        assert!(output.status.success(), "{output:?}");
        podman
    }

    /// The script, to do one thing.
    fn script(&self, what: &str) -> Command {
        let mut command = Command::new(scripts().join("podman.sh"));
        command
            .arg(what)
            .arg(self.stage.path("podman"))
            .env_remove("XDG_RUNTIME_DIR");
        if let Some(user) = self.rootless {
            command.env("ROOTLESS", user.to_string());
        }
        command
    }

    /// Runs a shell script in a container. What it prints comes by files of a folder of its own: Podman may lose what is
    /// printed just before the end.
    fn run(&self, options: &[&str], script_of_shell: &str) -> Output {
        let folder = tempfile::tempdir_in(self.stage.path("printed")).expect("a folder");
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(folder.path(), open).expect("permissions");
        let volume = format!("{}:/printed", folder.path().display());
        let script = format!("({script_of_shell}\n) > /printed/output 2> /printed/errors");
        let mut output = self
            .script("run")
            .args(["-v", &volume])
            .args(options)
            .args([IMAGE, "sh", "-c", &script])
            .output()
            .expect("a container");
        for (name, printed) in [
            ("output", &mut output.stdout),
            ("errors", &mut output.stderr),
        ] {
            // Podman's own are behind; without a container they are all.
            let file = fs::read(folder.path().join(name)).unwrap_or_default();
            printed.splice(0..0, file);
        }
        output
    }

    /// The same; it must succeed.
    fn succeeds(&self, options: &[&str], script_of_shell: &str) -> String {
        printed(&self.run(options, script_of_shell))
    }

    /// What a check of `doctor` says in a container of these options, with its remedy.
    fn doctor(&self, options: &[&str], check: &str) -> (String, String) {
        let output = self.run(options, "memfold doctor --json");
        let found: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {output:?}"));
        let checks = found["checks"].as_array().expect("checks");
        let row = checks
            .iter()
            .find(|row| row["name"] == check)
            .expect("the check");
        let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
        (text("verdict"), text("remedy"))
    }

    /// The option that gives a container a device of this group, or of root alone.
    fn device(&self, group: u32, mode: &str) -> String {
        device_option(&self.stage, group, mode)
    }
}

#[test]
fn a_tree_of_forks_is_managed_in_podmans_container() {
    // Beside others the tree may be over before memfold, whose limit it exceeds then, gets a CPU.
    alone!(&TOOLS);
    let podman = Podman::with(&[&compiled("forktree", &["forktree.c"], &[])]);
    let script = "cd /tmp && memfold run --resident 16M --stats - -- forktree 24 count";
    let user = format!("--user={STRANGER}:{STRANGER}");
    let device = podman.device(DEVICE_GROUP, "660");
    let group = format!("--group-add={DEVICE_GROUP}");
    for options in [&[DEVICE][..], &[user.as_str(), &group, &device]] {
        let out = podman.succeeds(options, script);
        assert_tree_paged_out(&out);
    }
}

#[test]
fn a_share_and_a_read_only_image_work_in_podmans_container() {
    beside!(&TOOLS);
    let podman = Podman::with(&[]);
    assert_share(|script| podman.succeeds(&CONFINED, script));
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn redis_saves_in_the_background_in_podmans_container() {
    beside!(&TOOLS);
    let programs = ["redis-server", "redis-cli", "redis-check-rdb"].map(find_program);
    let [Some(server), Some(client), Some(checker)] = &programs else {
        skip("redis-server");
        return;
    };
    let podman = Podman::with(&[server, client, checker]);
    let out = podman.succeeds(&[DEVICE], &format!("cd /tmp;{REDIS_SAVES}"));
    assert_paged_out(&out);
}

#[test]
fn doctor_prints_podmans_own_options() {
    beside!(&TOOLS);
    let podman = Podman::with(&[]);
    let user = format!("--user={STRANGER}:{STRANGER}");
    let of_group = podman.device(DEVICE_GROUP, "660");
    let of_root = podman.device(0, "600");
    let group = format!("podman run --device /dev/userfaultfd --group-add {DEVICE_GROUP} …");
    for (options, remedy) in [
        (&[][..], "podman run --device /dev/userfaultfd …"),
        (&[user.as_str(), &of_group], &group),
        (&[user.as_str(), &of_root], "chmod 666 /dev/userfaultfd"),
    ] {
        let (verdict, found) = podman.doctor(options, "userfaultfd");
        assert_eq!(verdict, "missing", "{options:?}");
        assert!(found.contains(remedy), "{options:?}: {found}");
    }
    assert_eq!(podman.doctor(&[DEVICE], "userfaultfd").0, "ok");
}

/// The host's own device is in such a container, as the host's user may open it.
#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn podman_without_root_is_given_the_hosts_device() {
    beside!(&TOOLS);
    let forktree = compiled("forktree", &["forktree.c"], &[]);
    let podman = Podman::of(Some(OTHER), &[&forktree]);
    let device = podman.device(OTHER, "660");
    let script = "cd /tmp && memfold run --resident 16M --stats - -- forktree 24";
    let out = podman.succeeds(&[&device], script);
    assert!(out.contains("forktree ok: 3 levels, 2 orphans\n"), "{out}");
    assert_eq!(number(&out, "processes_unmanaged"), 0, "{out}");

    let of_root = podman.device(0, "600");
    let (verdict, found) = podman.doctor(&[&of_root], "userfaultfd");
    assert_eq!(verdict, "missing");
    assert!(found.contains("--group-add keep-groups"), "{found}");
}
