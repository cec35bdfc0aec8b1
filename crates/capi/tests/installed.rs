//! The C libraries as they are installed: a program built by pkg-config works with each of them, and
//! they export the functions of the header only.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use tempfile::TempDir;

fn crate_folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a command that must succeed, and returns its output.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// The prefix that `install.sh` installed to, once for all tests of this process.
fn installed() -> &'static Path {
    static PREFIX: LazyLock<TempDir> = LazyLock::new(|| {
        let prefix = tempfile::tempdir().unwrap();
        let mut install = Command::new(crate_folder().join("install.sh"));
        if std::env::var_os("MEMFOLD_TEST_ROUNDS").is_some() {
            let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
            install.env("CARGO_TARGET_DIR", target);
            install.args(["--profile", "dev"]);
        } else {
            // The script would build the library's dependencies with other features than these tests'.
            let tests = std::env::current_exe().unwrap();
            install.arg("--built").arg(tests.parent().unwrap());
        }
        output(install.arg(prefix.path()));
        prefix
    });
    PREFIX.path()
}

fn library(name: &str) -> PathBuf {
    installed().join("lib").join(name)
}

fn pkg_config(arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    let folder = installed().join("lib/pkgconfig");
    let flags = output(
        command
            .args(arguments)
            .arg("memfold")
            .env("PKG_CONFIG_PATH", folder),
    );
    flags.split_whitespace().map(str::to_owned).collect()
}

/// Compiles a C program against the installed library.
fn compile(source: &Path, to: &Path, link: &[String]) {
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-Wall", "-Wextra", "-Werror", "-std=gnu11"]);
    compiler.args(pkg_config(&["--cflags"])).arg(source);
    output(compiler.args(link).arg("-o").arg(to));
}

fn header_functions() -> Vec<String> {
    let header = std::fs::read_to_string(installed().join("include/memfold.h")).unwrap();
    let mut functions: Vec<String> = header
        .lines()
        .filter(|line| line.starts_with(|first: char| first.is_ascii_lowercase()))
        .filter_map(|line| line.split_once('('))
        .filter_map(|(before, _)| before.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("memfold_"))
        .map(str::to_owned)
        .collect();
    functions.sort();
    functions
}

fn symbols(arguments: &[&str], library: &Path) -> Vec<String> {
    let listed = output(Command::new("nm").args(arguments).arg(library));
    let mut symbols: Vec<String> = listed
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .map(str::to_owned)
        .collect();
    symbols.sort();
    symbols
}

/// A program may have an LZ4 or zstd of its own.
#[test]
fn both_libraries_export_the_functions_of_the_header_and_nothing_else() {
    let functions = header_functions();
    assert!(functions.len() > 8, "{functions:?}");
    let shared = symbols(&["-D", "--defined-only"], &library("libmemfold.so"));
    assert_eq!(shared, functions);
    let fixed = symbols(&["-g", "--defined-only"], &library("libmemfold.a"));
    assert_eq!(fixed, functions);
}

#[test]
fn the_shared_library_has_a_soname_that_is_installed() {
    let dynamic = output(
        Command::new("readelf")
            .arg("-d")
            .arg(library("libmemfold.so")),
    );
    let soname = dynamic
        .lines()
        .find(|line| line.contains("(SONAME)"))
        .and_then(|line| line.split(['[', ']']).nth(1))
        .expect("a SONAME");
    assert!(soname.starts_with("libmemfold.so."), "{soname}");
    assert!(library(soname).exists());
}

/// Strict C has neither `siginfo_t` nor other names of POSIX.
#[test]
fn the_header_is_strict_c_and_has_a_version() {
    let program = r"
        #include <memfold.h>
        int main(void) {
            return memfold_version()[0] == '0' + MEMFOLD_VERSION_MAJOR ? 0 : 1;
        }
    ";
    let folder = tempfile::tempdir().unwrap();
    let (source, built) = (folder.path().join("strict.c"), folder.path().join("strict"));
    std::fs::write(&source, program).unwrap();
    for standard in ["-std=c99", "-std=c11", "-std=gnu17"] {
        let mut flags = pkg_config(&["--libs"]);
        flags.extend([standard, "-pedantic", "-Wall", "-Wextra", "-Werror"].map(str::to_owned));
        compile(&source, &built, &flags);
        let library = installed().join("lib");
        let run = Command::new(&built)
            .env("LD_LIBRARY_PATH", library)
            .status();
        assert_eq!(run.unwrap().code(), Some(0), "{standard}");
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
    let closes = folder.path().join("close");
    compile(&source, &closes, &["-ldl".to_owned()]);
    let run = Command::new(closes)
        .arg(library("libmemfold.so"))
        .status()
        .unwrap();
    assert_eq!(run.code(), Some(0));
}

#[test]
fn a_c_program_sorts_more_than_its_limit() {
    let folder = tempfile::tempdir().unwrap();
    let shared = pkg_config(&["--libs"]);
    let mut fixed = vec![library("libmemfold.a").display().to_string()];
    let private = pkg_config(&["--static", "--libs"]);
    fixed.extend(private.into_iter().filter(|flag| flag != "-lmemfold"));
    for (name, link) in [("shared", &shared), ("static", &fixed)] {
        let program = folder.path().join(name);
        compile(&crate_folder().join("examples/sort.c"), &program, link);
        let mut run = Command::new(&program);
        if name == "shared" {
            run.env("LD_LIBRARY_PATH", installed().join("lib"));
        }
        let said = output(run.args(["8", "6"]));
        assert!(said.starts_with("sorted 8 MiB under 6 MiB"), "{said}");
    }
}
