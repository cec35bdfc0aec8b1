//! The C interface: its header is up to date, and a C program works with both libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where cargo has put the libraries that it built for this test.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap().to_owned();
    assert!(
        folder.join("libmemfold.so").exists(),
        "no library in {folder:?}"
    );
    folder
}

/// `MEMFOLD_WRITE_HEADER=1 cargo test -p memfold --test c` writes it anew.
#[test]
fn the_header_is_what_the_source_says() {
    let config = cbindgen::Config::from_file(crate_folder().join("cbindgen.toml")).unwrap();
    let mut header = Vec::new();
    cbindgen::Builder::new()
        .with_config(config)
        .with_src(crate_folder().join("src/ffi.rs"))
        .generate()
        .unwrap()
        .write(&mut header);
    let header = String::from_utf8(header).unwrap();
    let path = crate_folder().join("include/memfold.h");
    if std::env::var_os("MEMFOLD_WRITE_HEADER").is_some() {
        std::fs::write(&path, &header).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), header);
}

/// In a child, a large region lies over where its parent had small ones.
#[test]
fn a_child_advises_on_its_own_regions() {
    use memfold::ffi::{
        MEMFOLD_PAGE_OUT, memfold_advise, memfold_free, memfold_map, memfold_new, memfold_unmap,
    };
    const PART: usize = 2 << 20;
    // SAFETY: pointers to what lives here; regions are touched only by the calls. The child calls
    // this library alone, whose locks nobody holds, and ends without destructors.
    unsafe {
        let limit = || {
            let mut limit = std::ptr::null_mut();
            assert_eq!(memfold_new(std::ptr::null(), &mut limit), 0);
            limit
        };
        let map = |limit, bytes| {
            let mut start = std::ptr::null_mut();
            assert_eq!(memfold_map(limit, bytes, &mut start), 0);
            start
        };
        let parents = limit();
        // Enough that the buffers of the child do not fill their place.
        let starts: Vec<_> = (0..128).map(|_| map(parents, PART)).collect();
        let child = libc::fork();
        if child == 0 {
            let run = || {
                let own = limit();
                let covering = (0..64).map(|_| map(own, 4 * PART)).find(|start| {
                    let range = *start..start.byte_add(4 * PART);
                    starts.iter().filter(|start| range.contains(*start)).count() > 1
                });
                let Some(start) = covering else {
                    return 2;
                };
                let advised = (0..8).all(|half| {
                    let half = start.byte_add(half * PART / 2);
                    memfold_advise(half, 4096, MEMFOLD_PAGE_OUT) == 0
                });
                i32::from(!advised)
            };
            libc::_exit(std::panic::catch_unwind(run).unwrap_or(3));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        let code = libc::WEXITSTATUS(status);
        assert!(libc::WIFEXITED(status), "{status:#x}");
        if code == 2 {
            eprintln!("not tested: the child's region lies elsewhere");
        }
        assert!(
            matches!(code, 0 | 2),
            "{code}: taken for a region of the parent's?"
        );
        for start in starts {
            assert_eq!(memfold_unmap(start), 0);
        }
        memfold_free(parents);
    }
}

/// Its signal handler stays installed, so its code has to stay.
#[test]
fn the_library_stays_when_it_is_closed() {
    let program = r#"
        #include <dlfcn.h>
        #include <memfold.h>
        int main(int count, char **arguments) {
            void *library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : 0;
            if (!library || !dlsym(library, "memfold_new"))
                return 2;
            if (dlclose(library))
                return 3;
            return dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD) ? 0 : 1;
        }
    "#;
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("close.c");
    std::fs::write(&source, program).unwrap();
    let compiled = Command::new("cc")
        .arg(format!("-I{}", crate_folder().join("include").display()))
        .arg(&source)
        .args(["-ldl", "-o"])
        .arg(folder.path().join("close"))
        .status()
        .unwrap();
    assert!(compiled.success());
    let run = Command::new(folder.path().join("close"))
        .arg(library_folder().join("libmemfold.so"))
        .status()
        .unwrap();
    assert_eq!(run.code(), Some(0));
}

#[test]
fn a_c_program_sorts_more_than_its_limit() {
    let folder = tempfile::tempdir().unwrap();
    let libraries = library_folder();
    let shared = [format!("-L{}", libraries.display()), "-lmemfold".to_owned()];
    let fixed = [libraries.join("libmemfold.a").display().to_string()];
    for (name, link) in [("shared", &shared[..]), ("static", &fixed[..])] {
        let program = folder.path().join(name);
        let compiled = Command::new("cc")
            .args(["-O2", "-Wall", "-Wextra", "-Werror", "-std=gnu11"])
            .arg(format!("-I{}", crate_folder().join("include").display()))
            .arg(crate_folder().join("examples/sort.c"))
            .args(link)
            .args(["-lpthread", "-lm", "-ldl", "-o"])
            .arg(&program)
            .output()
            .unwrap();
        assert!(
            compiled.status.success(),
            "{}",
            String::from_utf8_lossy(&compiled.stderr)
        );
        let run = Command::new(&program)
            .args(["8", "6"])
            .env("LD_LIBRARY_PATH", &libraries)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&run.stdout).into_owned();
        let wrong = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{name}: {said}{wrong}");
        assert!(said.starts_with("sorted 8 MiB under 6 MiB"), "{said}");
    }
}
