//! Refuses other targets in one line: the errors of code that is written for two CPU architectures would hide it.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of_target = |name: &str| env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let (os, arch) = (of_target("OS"), of_target("ARCH"));
    if os != "linux" || !matches!(&*arch, "x86_64" | "aarch64") {
        println!(
            "cargo::error=memfold runs on Linux on x86-64 and aarch64 only, not on {os} on {arch}"
        );
    }
}
