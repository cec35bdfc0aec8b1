//! The header of the C library is the one that cbindgen makes of the source. The test is here, not with
//! memfold-capi, for the time that cbindgen takes to build.

use memfold::Stats;
use std::path::Path;

/// `memfold_stats` in C, of the table that makes `Stats`.
fn stats_structure() -> String {
    let mut text = String::from(
        "/*\n Statistics of a limit.\n */\ntypedef struct {\n  /*\n   `sizeof(memfold_stats)`, to be \
         set before the call.\n   */\n  size_t size;\n  /*\n   The mode of the limit: one of \
         `MEMFOLD_MODE_`.\n   */\n  uint32_t mode;\n",
    );
    for field in Stats::FIELDS {
        text.push_str("  /*\n");
        for line in field.description.lines() {
            text.push_str(&format!("   {}\n", line.trim()));
        }
        text.push_str(&format!("   */\n  uint64_t {};\n", field.name));
    }
    text + "} memfold_stats;\n"
}

/// `MEMFOLD_WRITE_HEADER=1 cargo test -p memfold-lab --test c_header` writes it anew.
#[test]
fn the_header_is_what_the_source_says() {
    let crate_folder = &Path::new(env!("CARGO_MANIFEST_DIR")).join("../capi");
    let mut config = cbindgen::Config::from_file(crate_folder.join("cbindgen.toml")).unwrap();
    config.after_includes = Some(format!("\n{}", stats_structure()));
    config.export.exclude.push("memfold_stats".to_owned());
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
    assert!(
        std::fs::read_to_string(&path).unwrap() == header,
        "include/memfold.h is not what the source gives: set MEMFOLD_WRITE_HEADER=1"
    );
}
