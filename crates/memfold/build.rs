//! Keeps the shared library in a process that once loaded it: its signal handler, and the threads
//! of limits that were not given up, must not lose their code by `dlclose`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
