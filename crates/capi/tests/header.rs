//! The header is the one that cbindgen makes of the source.

use std::path::Path;

/// `MEMFOLD_WRITE_HEADER=1 cargo test -p memfold-capi --test header` writes it anew.
#[test]
fn the_header_is_what_the_source_says() {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(crate_folder.join("cbindgen.toml")).unwrap();
    let mut header = Vec::new();
    cbindgen::Builder::new()
        .with_config(config)
        .with_src(crate_folder.join("src/lib.rs"))
        .generate()
        .unwrap()
        .write(&mut header);
    let header = String::from_utf8(header).unwrap();
    let path = crate_folder.join("include/memfold.h");
    if std::env::var_os("MEMFOLD_WRITE_HEADER").is_some() {
        std::fs::write(&path, &header).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), header);
}
