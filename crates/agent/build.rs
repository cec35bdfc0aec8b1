//! Links the freestanding library without the C library and its start files, so that it loads
//! into any dynamically linked program, whichever C library that uses.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_STANDALONE").is_some() {
        for argument in ["-nostdlib", "-nostartfiles", "-Wl,-z,now", "-Wl,-Bsymbolic"] {
            println!("cargo::rustc-cdylib-link-arg={argument}");
        }
    }
}
