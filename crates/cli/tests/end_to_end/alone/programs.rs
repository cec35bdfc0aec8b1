//! Ordinary programs in a quarter of the memory they use: same output, limit held.

use crate::support::{
    Limits, MIB, Program, compiled, python, same_as_unlimited, short_or_long, source,
};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::Duration;

#[test]
fn cpython_hashes_what_it_builds() {
    alone!(&["python3"]);
    let native = same_as_unlimited(
        &Program::new(python())
            .arg(source("objects.py"))
            .arg(short_or_long("0.6", "1")),
        65,
    );
    assert!(
        native.peak().total > short_or_long(80, 140) * MIB,
        "the program is meant to be large"
    );
}

/// 64 MiB of noise, looked at in a random order again and again.
const NOISE: &str = "
import hashlib, random
blocks = [random.Random(n).randbytes(1 << 14) for n in range(4096)]
total, order = hashlib.sha256(), random.Random(0)
for _ in range(20000):
    total.update(order.choice(blocks))
print(total.hexdigest())
";

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn incompressible_memory_stays_and_no_fault_waits_for_it() {
    alone!(&["python3"]);
    let program = Program::new(python()).args(["-c", NOISE]);
    let native = program.run(Limits::None);
    native.assert_success();
    let limited = program.run(Limits::Total(30 * MIB));
    limited.assert_success();
    assert_eq!(limited.text(), native.text());
    let warnings = limited.errors.matches("the limit is exceeded").count();
    assert_eq!(warnings, 1, "{}", limited.errors);
    assert!(limited.number("over_limit_pages") > 0.0);
    assert!(limited.peak().total < native.peak().total + 16 * MIB);
    // Each of 16,384 pages is tried now and then, but not moved for nothing whenever it is there.
    assert!(
        limited.number("pages_out") < 8000.0,
        "{}",
        limited.number("pages_out")
    );
    // Where the pool does not count, it goes out like all else.
    let limited = program.run(Limits::Resident(30 * MIB));
    limited.assert_success();
    assert_eq!(limited.text(), native.text());
    limited.assert_no_warning_of_the_limit();
    assert!(limited.number("pages_out") > 50_000.0);
    limited.assert_limit_held();
}

/// Memory that is given up and written again leaves no later than other memory.
#[test]
fn what_is_freed_and_written_again_stays_within_the_limit() {
    alone!(&["cc"]);
    for advice in ["free", "dontneed"] {
        let program = Program::new(compiled("reuse", &["reuse.c"], &[])).args(["96", "2", advice]);
        let outcome = program.run(Limits::Resident(32 * MIB));
        outcome.assert_success();
        assert_eq!(outcome.text(), "reuse ok\n");
        outcome.assert_limit_held();
    }
}

/// The first write to a page that was only read takes memory, and waits for room.
#[test]
fn memory_that_is_read_before_it_is_written_stays_within_the_limit() {
    alone!(&["cc"]);
    let program = compiled("zeros", &["zeros.c"], &[]);
    for read in ["before", "after"] {
        let outcome = Program::new(&program)
            .args(["192", read])
            .run(Limits::Resident(32 * MIB));
        outcome.assert_success();
        assert_eq!(outcome.text(), "zeros ok\n");
        outcome.assert_swapped(160 * MIB);
        outcome.assert_limit_held();
    }
}

/// Memory that may be executed, which is not managed, and some that is.
const EXECUTABLE: &str = "\
import mmap
allow_all = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
code = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, allow_all)
data = bytearray(16 << 20)
for at in range(0, len(code), 4096):
    code[at] = 1
for at in range(0, len(data), 4096):
    data[at] = (at >> 12) & 255
print(sum(data[at] for _ in range(20) for at in range(0, len(data), 4096)))
";

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn immovable_memory_stays_and_no_fault_waits_for_it() {
    alone!(&["python3"]);
    let program = Program::new(python())
        .args(["-c", EXECUTABLE])
        .timeout(Duration::from_secs(40));
    let native = program.run(Limits::None);
    let limited = program.run(Limits::Resident(24 * MIB));
    limited.assert_success();
    assert_eq!(limited.text(), native.text());
    let warnings = limited.errors.matches("the limit is exceeded").count();
    assert_eq!(warnings, 1, "{}", limited.errors);
    // The limit alone is short by some 12 MiB; what is managed needs 16 more.
    assert!(limited.peak().total < native.peak().total + 16 * MIB);
}

/// A C program that keeps an optimising compiler busy: many functions that call
/// each other, loops over tables, and switches.
fn generated_source(functions: usize) -> String {
    let mut text = String::from("typedef unsigned long u64;\nextern u64 table[4096];\n");
    for number in 0..functions {
        let other = (number * 7919 + 13) % functions;
        write!(
            text,
            "u64 f{other}(u64, u64);\n\
             u64 f{number}(u64 a, u64 b) {{\n\
             \x20 u64 sum = a * {number}UL + b;\n\
             \x20 for (u64 i = 0; i < {}; i++) {{\n\
             \x20   sum += table[(a + i * {}) % 4096] ^ (b >> (i % 13));\n\
             \x20   switch ((sum + i) % 7) {{\n\
             \x20     case 0: sum ^= a; break; case 1: sum += b * {}; break; case 2: sum -= table[i % 4096]; break;\n\
             \x20     case 3: table[sum % 4096] = sum; break; case 4: a = sum + i; break; default: b ^= sum; }}\n\
             \x20 }}\n\
             \x20 return a > b ? sum : f{other}(sum, a) + {number};\n}}\n",
            5 + number % 40,
            1 + number % 31,
            3 + number % 1000
        )
        .expect("a string");
    }
    text
}

#[test]
fn a_c_compiler_writes_the_same_object_file() {
    alone!(&["cc", "sha256sum"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("generated.c");
    fs::write(&file, generated_source(short_or_long(250, 1200))).expect("the source is written");
    same_as_unlimited(&compilation("cc -O2", &file, folder.path()), 60);
}

#[test]
fn a_cplusplus_compiler_writes_the_same_object_file() {
    only_in_the_long_form!();
    alone!(&["g++", "sha256sum"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let instances = short_or_long(2, 4);
    let command = format!("g++ -std=c++17 -O1 -DINSTANCES={instances}");
    same_as_unlimited(
        &compilation(&command, &source("templates.cc"), folder.path()),
        60,
    );
}

/// Compiles and prints the object file's digest.
fn compilation(compiler: &str, file: &Path, folder: &Path) -> Program {
    let script = format!("{compiler} -c \"$0\" -o \"$1\" && sha256sum < \"$1\"");
    Program::new("sh")
        .args(["-c", &script])
        .arg(file)
        .arg(folder.join("object.o"))
}

#[test]
fn sort_orders_a_large_file() {
    alone!(&["sort", "sha256sum"]);
    let folder = tempfile::tempdir().expect("a temporary directory");
    let file = folder.path().join("lines");
    let mut text = String::new();
    let mut state: u64 = 1;
    for number in 0..short_or_long(400_000, 900_000) {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        writeln!(
            text,
            "{:012x} line {number} of many, a key and some text",
            state >> 20
        )
        .expect("a string");
    }
    fs::write(&file, text).expect("the lines are written");
    let script = "LC_ALL=C sort --parallel=4 --buffer-size=400M \"$0\" | sha256sum";
    same_as_unlimited(&Program::new("sh").args(["-c", script]).arg(&file), 65);
}

#[test]
fn sqlite_builds_and_checks_a_database_in_memory() {
    alone!(&["sqlite3"]);
    let native = same_as_unlimited(
        &Program::new("sqlite3")
            .arg(":memory:")
            .input(source("database.sql")),
        65,
    );
    assert!(
        native.text().starts_with("ok\n"),
        "the database is sound: {}",
        native.text()
    );
}

#[test]
#[ignore = "takes long: cargo test -- --include-ignored"]
fn a_shell_runs_many_short_pipelines() {
    alone!(&["bash", "sed", "tr", "cksum"]);
    same_as_unlimited(
        &Program::new("bash")
            .arg(source("many_processes.sh"))
            .arg(short_or_long("10", "25")),
        70,
    );
}

#[test]
fn node_hashes_its_heap_between_collections() {
    alone!(&["node"]);
    same_as_unlimited(
        &Program::new("node")
            .arg(source("heap.js"))
            .arg(short_or_long("50000", "80000")),
        75,
    );
}

#[test]
fn a_java_virtual_machine_checks_its_heap_between_collections() {
    only_in_the_long_form!();
    alone!(&["java"]);
    let program = Program::new("java")
        .args(["-Xmx400m", "-Xms16m"])
        .arg(source("Heap.java"))
        .arg(short_or_long("50000", "80000"));
    same_as_unlimited(&program, 75);
}
