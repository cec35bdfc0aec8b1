//! Builds the preload library that travels inside the binary.
//!
//! The library must be freestanding (no C library, no unwinding, no instrumentation), whatever the
//! build that asks for it is: a debug build, a test with coverage or sanitizers, `cargo clippy`.
//! So it is built by a cargo of its own, into this crate's output directory, from which the binary
//! embeds it. Cargo locks a target directory, not a workspace: the two builds do not wait for each
//! other.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "memfold-agent";
const LIBRARY: &str = "libmemfold_agent.so";

fn main() {
    let manifest_dir = PathBuf::from(required("CARGO_MANIFEST_DIR"));
    let workspace = manifest_dir
        .ancestors()
        .nth(2)
        .expect("the crate lies two folders down");
    let agent = workspace.join("crates/agent");
    assert!(
        agent.join("Cargo.toml").is_file(),
        "memfold-cli is built from the memfold repository: {} holds no {PACKAGE}",
        agent.display(),
    );
    // Relative, so that they are this checkout's whichever one the target directory was filled by.
    for source in ["build.rs", "../agent", "../sys", "../../Cargo.toml"] {
        println!("cargo::rerun-if-changed={source}");
    }
    let library = build(&workspace.join("Cargo.toml"));
    println!("cargo::rustc-env=MEMFOLD_AGENT={}", library.display());
}

/// Runs the nested build and returns the library's path.
fn build(workspace_manifest: &Path) -> PathBuf {
    let target = required("TARGET");
    let target_dir = PathBuf::from(required("OUT_DIR")).join("agent");
    let mut cargo = Command::new(required("CARGO"));
    forget_outer_build(&mut cargo);
    cargo
        .arg("build")
        .args(["--release", "--package", PACKAGE, "--no-default-features"])
        .args(["--features", "standalone"])
        // The library depends on nothing outside the workspace, and the outer build has settled
        // the lock file: there is nothing to fetch and nothing to decide, online or not.
        .args(["--locked", "--offline"])
        .args(["--config", "profile.release.panic='abort'"])
        .args(["--config", "profile.release.strip=true"])
        .arg("--manifest-path")
        .arg(workspace_manifest)
        .arg("--target")
        .arg(&target)
        .arg("--target-dir")
        .arg(&target_dir);
    let status = cargo
        .status()
        .unwrap_or_else(|error| panic!("cannot run cargo for {PACKAGE}: {error}"));
    assert!(
        status.success(),
        "building {PACKAGE} failed ({status}); its messages are above"
    );
    let library = target_dir.join(&target).join("release").join(LIBRARY);
    assert!(
        library.is_file(),
        "building {PACKAGE} left no {}",
        library.display()
    );
    library
}

/// Takes away what describes the outer build: flags (coverage, sanitizers), wrappers (clippy,
/// caches), profiles, and the package that this script belongs to.
fn forget_outer_build(cargo: &mut Command) {
    const PREFIXES: [&str; 7] = [
        "CARGO_PROFILE_",
        "CARGO_UNSTABLE_",
        "CARGO_CFG_",
        "CARGO_FEATURE_",
        "CARGO_PKG_",
        "CARGO_TARGET_",
        "CARGO_BUILD_",
    ];
    const NAMES: [&str; 5] = [
        "RUSTFLAGS",
        "RUSTDOCFLAGS",
        "CARGO_MANIFEST_LINKS",
        "CARGO_PRIMARY_PACKAGE",
        "LLVM_PROFILE_FILE",
    ];
    for (name, _) in env::vars_os() {
        let Some(text) = name.to_str() else { continue };
        let linker = text.starts_with("CARGO_TARGET_") && text.ends_with("_LINKER");
        if (PREFIXES.iter().any(|prefix| text.starts_with(prefix)) && !linker)
            || NAMES.contains(&text)
        {
            cargo.env_remove(&name);
        }
    }
    // Set and empty, these also override what a cargo configuration file says.
    for name in [
        "CARGO_ENCODED_RUSTFLAGS",
        "RUSTC_WRAPPER",
        "RUSTC_WORKSPACE_WRAPPER",
    ] {
        cargo.env(name, "");
    }
}

fn required(name: &str) -> OsString {
    env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name} for build scripts"))
}
