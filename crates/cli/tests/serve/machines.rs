//! Virtual machines with the distribution's own kernel, and a disk of memfold: `tests/kernels`.

use crate::support::{MIB, Served, has};
use memfold_testing::skip;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/kernels");

/// The folder of a kernel; nothing, and the test is skipped, where none can be had.
fn kernel() -> Option<&'static Path> {
    static KERNEL: OnceLock<Option<PathBuf>> = OnceLock::new();
    let tools = [
        "qemu-system-x86_64",
        "busybox",
        "cpio",
        "apt-get",
        "dpkg-deb",
        "mkfs.ext4",
        "e2fsck",
        "cc",
    ];
    if !has(&tools) {
        return None;
    }
    let found = KERNEL.get_or_init(|| {
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
        let fetch = Command::new(format!("{FOLDER}/fetch.sh"))
            .arg(kept)
            .output();
        let fetch = fetch.expect("fetch.sh runs");
        eprint!("{}", String::from_utf8_lossy(&fetch.stderr));
        let path = String::from_utf8(fetch.stdout).expect("a path");
        fetch.status.success().then(|| path.trim_end().into())
    });
    if found.is_none() {
        skip("a kernel of the distribution, by apt-get download");
    }
    found.as_deref()
}

/// A machine whose disk `/dev/vda` is memfold's.
struct Machine<'a> {
    kernel: &'a Path,
    served: &'a Served,
}

impl Machine<'_> {
    /// Runs a script of `tests/kernels` in it; what the script printed.
    fn run(&self, script: &str, options: &[&str]) -> String {
        let drive = format!(
            "file={},format=raw,if=virtio,discard=unmap",
            self.served.uri()
        );
        let modules = ["virtio_pci", "virtio_blk", "ext4", "crc32c_generic"];
        let output = Command::new(format!("{FOLDER}/run.sh"))
            .args(modules.iter().flat_map(|module| ["--module", module]))
            .args(options)
            .arg(self.kernel)
            .arg(format!("{FOLDER}/{script}"))
            .args(["-drive", &drive])
            .output()
            .expect("run.sh runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "{script} {options:?}: {}: {text}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        text
    }
}

/// The number after a name at the beginning of a line.
fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let line = line.unwrap_or_else(|| panic!("no {name}: {text}"));
    line.trim().parse().expect("a number")
}

fn count(disk: &serde_json::Value, name: &str) -> u64 {
    disk[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name}: {disk}"))
}

/// A statically linked program.
fn swapped() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("swapped");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/swapped.c");
    let status = Command::new("cc")
        .args([
            "-O2", "-Wall", "-Wextra", "-Werror", "-static", source, "-o",
        ])
        .arg(&path)
        .status();
    assert!(status.expect("cc runs").success(), "{source}");
    path
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_machine_swaps_on_a_disk_and_its_program_finds_every_byte() {
    let Some(kernel) = kernel() else { return };
    let served = Served::start(&["--size", "512M", "--limit", "256M"]);
    let machine = Machine {
        kernel,
        served: &served,
    };
    let program = swapped().display().to_string();
    let rounds = std::env::var("MEMFOLD_TEST_ROUNDS").unwrap_or_else(|_| "1".to_owned());
    let rounds = format!("ROUNDS={rounds}");
    let options = ["--file", &program, "--memory", "128M", "--seconds", "120"];
    let set = [
        "--set",
        "DEVICE=vda",
        "--set",
        "MEBIBYTES=120",
        "--set",
        &rounds,
    ];
    let text = machine.run("swap.sh", &[&options[..], &set].concat());
    assert!(text.contains("verified 30720 pages"), "{text}");
    assert!(text.contains("swapoff done"), "{text}");
    let (swapped_out, swapped_in) = (number(&text, "pswpout"), number(&text, "pswpin"));
    assert!(swapped_out > 10_000 && swapped_in > 10_000, "{text}");
    let disk = served.stat();
    assert!(
        count(&disk, "written_bytes") >= swapped_out * 4096,
        "{disk}"
    );
    assert_eq!(
        count(&disk, "failed_reads") + count(&disk, "failed_writes"),
        0,
        "{disk}"
    );
    // One discard was of all, at swapon; the others are of what the program left.
    assert!(count(&disk, "discards") > 2, "{disk}");
    // The machine's kernel discards whole clusters of its own alone: a sixth to a quarter is left.
    let left = count(&disk, "original_bytes");
    assert!(left < count(&disk, "written_bytes") / 3, "{disk}");
    assert!(
        count(&disk, "used_bytes") < count(&disk, "peak_bytes") / 2,
        "{disk}"
    );
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_file_system_keeps_its_files_and_gives_memory_back() {
    const FILES: u64 = 16;
    let Some(kernel) = kernel() else { return };
    let served = Served::start(&["--size", "512M", "--limit", "256M"]);
    let machine = Machine {
        kernel,
        served: &served,
    };
    let files = format!("FILES={FILES}");
    let step = |step: &str| {
        let programs = [
            "--program",
            "mkfs.ext4",
            "--program",
            "e2fsck",
            "--seconds",
            "120",
        ];
        let set = ["--set", step, "--set", &files];
        let text = machine.run("filesystem.sh", &[&programs[..], &set].concat());
        assert!(text.contains("non-contiguous"), "e2fsck: {text}");
        assert_eq!(
            text.lines().last(),
            Some((2 * FILES).to_string().as_str()),
            "{text}"
        );
        served.stat()
    };
    let filled = step("STEP=fill");
    // A MiB of noise in each file that is kept, and in each that is deleted.
    let (kept, all) = (FILES * MIB as u64, 2 * FILES * MIB as u64);
    assert!(count(&filled, "used_bytes") > all, "{filled}");
    let trimmed = step("STEP=trim");
    assert!(count(&trimmed, "used_bytes") < kept + kept / 2, "{trimmed}");
    assert!(count(&trimmed, "used_bytes") > kept, "{trimmed}");
    assert_eq!(
        count(&trimmed, "failed_reads") + count(&trimmed, "failed_writes"),
        0
    );
}
