//! Chooses the model instead of the host's kernel.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cfg=simulated");
    println!("cargo::rustc-check-cfg=cfg(simulated)");
    // Features of the pager that its sources name.
    println!("cargo::rustc-check-cfg=cfg(feature, values(\"fuzzing\", \"replay\", \"serde\"))");
}
