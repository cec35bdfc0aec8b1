//! Builds the preload library that travels inside the binary.
//!
//! The library must be freestanding (no C library, no unwinding, no instrumentation), whatever the
//! build that asks for it is: a debug build, a test with coverage or sanitizers, `cargo clippy`. It is
//! two crates without dependencies, so this calls the compiler for each of them, and passes none of the
//! outer build's flags on. (A nested cargo would resolve the whole lock file, which fails without a
//! registry.)
//!
//! `preload/agent` and `preload/sys` are links to the sources of these crates in the repository, and
//! copies of them in the package, which therefore holds all that it is built from.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The workspace's edition.
const EDITION: &str = "--edition=2024";

/// As fast as possible, whatever this build is; nothing unwinds without the C library.
const CODE: [&str; 3] = ["-Copt-level=3", "-Ccodegen-units=1", "-Cpanic=abort"];

/// Atomic operations as instructions: by default they are functions on this architecture, which ask the C library what the
/// CPU has.
const CODE_AARCH64: &str = "-Ctarget-feature=-outline-atomics";

/// Loads into any dynamically linked program, whichever C library that uses.
const LINK: [&str; 10] = [
    "-Clto=fat",
    "-Cstrip=symbols",
    "-Clink-arg=-nostdlib",
    "-Clink-arg=-nostartfiles",
    "-Clink-arg=-Wl,-z,now",
    // As few mappings as a linker makes of itself, and one page of statics: every program maps and unmaps them.
    "-Clink-arg=-Wl,-z,noseparate-code,-z,norelro",
    "-Clink-arg=-Wl,-Bsymbolic",
    // Where no loader calls it: see the agent's `entry.rs`.
    "-Clink-arg=-Wl,-e,memfold_entry",
    // A function that the compiler takes to be there (`memcpy`) is not: nothing is linked but this.
    "-Clink-arg=-Wl,-z,defs",
    // Where programs are linked statically (musl), rustc makes no shared library unless it is told.
    "-Ctarget-feature=-crt-static",
];

fn main() {
    name_the_commit();
    // Relative, so that they are this checkout's whichever one the target directory was filled by.
    for source in ["build.rs", "preload/agent", "preload/sys"] {
        println!("cargo::rerun-if-changed={source}");
    }
    let out = PathBuf::from(required("OUT_DIR"));
    let sys = out.join("libmemfold_sys.rlib");
    let library = out.join("libmemfold_agent.so");
    let sys_crate = ["--crate-name=memfold_sys", "--crate-type=rlib"];
    compile("preload/sys/lib.rs", &sys, sys_crate);

    let mut external = OsString::from("--extern=memfold_sys=");
    external.push(&sys);
    let mut arguments: Vec<OsString> = LINK.map(OsString::from).to_vec();
    arguments.extend([external, r#"--cfg=feature="standalone""#.into()]);
    arguments.extend(["--crate-name=memfold_agent", "--crate-type=cdylib"].map(OsString::from));
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut argument = OsString::from("-Clinker=");
        argument.push(linker);
        arguments.push(argument);
    }
    compile("preload/agent/lib.rs", &library, arguments);
    println!("cargo::rustc-env=MEMFOLD_AGENT={}", library.display());
}

/// For `memfold -V`: the commit that is built, `MEMFOLD_COMMIT` where there is no repository (packages).
fn name_the_commit() {
    println!("cargo::rerun-if-env-changed=MEMFOLD_COMMIT");
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
    };
    // A package's sources may lie in a repository of another project.
    let is_own = git(&["ls-files", "build.rs"]).is_some();
    if is_own && let Some(head) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={head}");
    }
    let head = || git(&["rev-parse", "--short=12", "HEAD"]).filter(|_| is_own);
    let commit = env::var("MEMFOLD_COMMIT").ok().or_else(head);
    let commit = commit.unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=MEMFOLD_COMMIT={commit}");
}

/// Compiles a crate. Its path is relative, so that messages and the library are the same in every checkout.
fn compile<A: AsRef<OsStr>>(source: &str, output: &Path, arguments: impl IntoIterator<Item = A>) {
    let mut rustc = Command::new(required("RUSTC"));
    rustc
        .current_dir(required("CARGO_MANIFEST_DIR"))
        .args([EDITION, source])
        .args(CODE)
        // The build of the crate itself reports them.
        .arg("--cap-lints=allow")
        .arg("--target")
        .arg(required("TARGET"))
        .arg("-o")
        .arg(output)
        .args(arguments);
    if required("CARGO_CFG_TARGET_ARCH") == "aarch64" {
        rustc.arg(CODE_AARCH64);
    }
    let status = rustc
        .status()
        .unwrap_or_else(|error| panic!("cannot run rustc for {source}: {error}"));
    assert!(
        status.success(),
        "compiling {source} failed ({status}); its messages are above"
    );
}

fn required(name: &str) -> OsString {
    env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name} for build scripts"))
}
