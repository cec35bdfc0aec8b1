//! Link arguments of the shared library: it stays mapped after `dlclose`, because its signal
//! handlers and threads keep running, and has a SONAME.

use std::env::var;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // cargo-c, which enables this feature, passes the same SONAME itself.
    if var("CARGO_FEATURE_CAPI").is_err() {
        let part = |name: &str| var(name).expect("cargo sets the version");
        // A minor version may change the ABI while the major version is 0.
        let abi = match (
            part("CARGO_PKG_VERSION_MAJOR"),
            part("CARGO_PKG_VERSION_MINOR"),
        ) {
            (major, minor) if major == "0" => format!("0.{minor}"),
            (major, _) => major,
        };
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmemfold.so.{abi}");
    }
}
