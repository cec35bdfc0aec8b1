//! Tells the compiler that `--cfg loom` is meant: the models are built with it.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rerun-if-changed=build.rs");
}
