//! A program whose memory the host itself swaps out while memfold moves it.

use crate::support::{Limits, MIB, Program, skip, torture, torture_seconds};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MEMORY_GROUPS: &str = "/sys/fs/cgroup/memory";
const HOT_ADD: &str = "/sys/class/zram-control/hot_add";

/// A zram device that the host swaps to, until dropped.
struct HostSwap {
    number: String,
    swaps: bool,
}

impl HostSwap {
    fn start(bytes: u64) -> io::Result<HostSwap> {
        let number = fs::read_to_string(HOT_ADD)?.trim().to_owned();
        let mut swap = HostSwap {
            number,
            swaps: false,
        };
        fs::write(
            format!("/sys/block/zram{}/disksize", swap.number),
            bytes.to_string(),
        )?;
        for command in ["mkswap", "swapon"] {
            let status = Command::new(command)
                .arg(swap.node())
                .stdout(Stdio::null())
                .status()?;
            assert!(status.success(), "{command} {}", swap.node());
        }
        swap.swaps = true;
        Ok(swap)
    }

    fn node(&self) -> String {
        format!("/dev/zram{}", self.number)
    }
}

impl Drop for HostSwap {
    fn drop(&mut self) {
        if self.swaps {
            let status = Command::new("swapoff").arg(self.node()).status();
            if !status.is_ok_and(|status| status.success()) {
                eprintln!("{} is still swapped to", self.node());
            }
        }
        if let Err(error) = fs::write("/sys/class/zram-control/hot_remove", &self.number) {
            eprintln!("{} cannot be removed: {error}", self.node());
        }
    }
}

/// A memory cgroup, removed when dropped.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    fn new() -> io::Result<MemoryGroup> {
        let name = format!("memfold-test-{}", std::process::id());
        let folder = Path::new(MEMORY_GROUPS).join(name);
        fs::create_dir(&folder)?;
        Ok(MemoryGroup(folder))
    }

    /// Has the kernel take all that the group has in memory.
    fn empty(&self) {
        // It gives up where pages are just in use.
        let _ = fs::write(self.0.join("memory.force_empty"), "0");
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            eprintln!("{} cannot be removed: {error}", self.0.display());
        }
    }
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn swapped_out() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").expect("vmstat can be read");
    let mut lines = text.lines();
    let figure = lines.find_map(|line| line.strip_prefix("pswpout "));
    figure.map_or(0, |figure| figure.parse().expect("a number"))
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn pages_survive_the_hosts_own_swap() {
    alone!(&["cc", "sh", "mkswap", "swapon", "swapoff"]);
    if !Path::new(HOT_ADD).exists() {
        return skip("zram (CONFIG_ZRAM)");
    }
    if !Path::new(MEMORY_GROUPS).join("tasks").exists() {
        return skip("memory cgroups, version 1");
    }
    let swap = HostSwap::start(1 << 30).expect("zram can be swapped to");
    let group = MemoryGroup::new().expect("a memory cgroup can be made");
    let before = swapped_out();
    let script = format!("echo $$ > {}/tasks; exec \"$@\"", group.0.display());
    // All but what frees lazily: memory that a fork copies then is the kernel's to take in the child.
    let disturbances = "grow,shrink,move,part,dontunmap,dontneed,advice,readonly,noaccess,unmap,fixed,\
                        syscalls,lock,churn,sparse,brk,fork,wipe,spawn,signals,threads";
    let seconds = torture_seconds(5).to_string();
    let program = Program::new("sh")
        .args(["-c", &script, "sh"])
        .arg(torture())
        .args(["--seconds", &seconds, "--megabytes", "64", "--threads", "3"])
        .args(["--disturb", disturbances]);
    let ended = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        // Also if it fails: the scope waits for the other.
        let _end = SetOnDrop(&ended);
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                group.empty();
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        program.start(Limits::Resident(24 * MIB)).wait()
    });
    let swapped = swapped_out() - before;
    drop(group);
    drop(swap);
    outcome.assert_success();
    assert!(
        outcome.number("pages_in") > 1000.0,
        "hardly anything was out"
    );
    assert!(swapped > 1000, "the host swapped {swapped} pages only");
}
