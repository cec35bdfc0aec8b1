//! Compilers under a limit: a C library (zstd) and a Rust crate from the registry.

use std::{
    collections::BTreeMap,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{backend::Session, measure, workload::Figures};
use crate::host::Scratch;

/// Approximate peak memory of the compilers without a limit, in MB.
pub const NATURAL_MEGABYTES: usize = 260;
/// The limit, in MB.
pub const RESIDENT_MEGABYTES: usize = 96;

/// `zstd-sys` contains the C sources of zstd.
const MANIFEST: &str = "\
[package]
name = \"memfold-lab-build\"
edition = \"2021\"
[dependencies]
regex-automata = \"0.4\"
zstd-sys = { version = \"2\", default-features = false }
";

/// What to build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Project {
    C,
    Both,
}

impl Project {
    /// Why it cannot run on this host, if so.
    pub fn missing(self) -> Option<String> {
        let tools: &[&str] = match self {
            Self::C => &["cc", "make", "cargo"],
            Self::Both => &["cc", "make", "cargo", "rustc"],
        };
        let there = |tool: &&str| Command::new(tool).arg("--version").output().is_ok();
        let missing = tools.iter().find(|tool| !there(tool))?;
        Some(format!("{missing} is not installed"))
    }

    /// One run. The result to compare is a hash of every object file.
    pub fn run(self, session: &Session, sources: &Sources) -> Result<(Figures, String)> {
        // Objects contain paths: use the same folder in every run.
        let output = sources.folder.path().join("output");
        let jobs = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .to_string();
        let mut figures = Figures::default();
        let mut results = Vec::new();
        let c = ["-s", "-j", &jobs, "-C", "."].map(str::to_owned);
        let rust = [
            "build",
            "--release",
            "--offline",
            "--quiet",
            "-p",
            sources.package,
            "-j",
            &jobs,
        ]
        .map(str::to_owned);
        let steps: [(&str, &str, &[String]); 2] =
            [("c_seconds", "make", &c), ("rust_seconds", "cargo", &rust)];
        let steps = match self {
            Self::C => &steps[..1],
            Self::Both => &steps[..],
        };
        let mut cpu_times = Figures::default();
        let mut total = 0.0;
        for (name, program, arguments) in steps {
            if output.exists() {
                fs::remove_dir_all(&output)?;
            }
            fs::create_dir_all(output.join("c"))?;
            let mut command = session.command(program.as_ref(), arguments)?;
            command
                .current_dir(sources.folder.path())
                .env("CARGO_TARGET_DIR", output.join("rust"))
                .env_remove("RUSTFLAGS")
                .stderr(Stdio::inherit());
            let started = Instant::now();
            let ended = measure::run(command, |stop| session.watch(stop))?;
            let seconds = started.elapsed().as_secs_f64();
            total += seconds;
            figures = figures.with(name, seconds);
            cpu_times = sum(&cpu_times, &ended.figures);
            results.push(fingerprint(&output)?);
        }
        figures.0.extend(cpu_times.0);
        figures = figures.with("seconds", total);
        Ok((figures, results.join("\n")))
    }
}

fn sum(one: &Figures, other: &Figures) -> Figures {
    let sums = other
        .0
        .iter()
        .map(|(name, value)| (name.clone(), value + one.get(name).unwrap_or(0.0)));
    Figures(sums.collect())
}

/// A folder with the sources to build.
#[derive(Debug)]
pub struct Sources {
    folder: Scratch,
    /// The Rust crate to build.
    package: &'static str,
}

impl Sources {
    /// Fetches the crates (from the registry or cargo's cache) and writes a makefile. Above scale 1
    /// there are more C files and a larger crate; the compilers' peak memory stays the same.
    pub fn fetch(scale: f64) -> Result<Self> {
        let folder = Scratch::new()?;
        fs::write(folder.path().join("Cargo.toml"), MANIFEST)?;
        fs::create_dir(folder.path().join("src"))?;
        fs::write(folder.path().join("src/lib.rs"), "")?;
        cargo(folder.path(), &["fetch", "--quiet"])
            .context("cannot fetch the crates to build from the registry")?;
        let metadata = cargo(
            folder.path(),
            &["metadata", "--format-version", "1", "--offline"],
        )?;
        let zstd = zstd_sources(&serde_json::from_slice(&metadata)?)?;
        fs::write(folder.path().join("Makefile"), makefile(&zstd, scale)?)?;
        let package = match scale {
            small if small <= 1.0 => "regex-syntax",
            _ => "regex-automata",
        };
        Ok(Self { folder, package })
    }
}

fn cargo(folder: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
    let output = Command::new("cargo")
        .args(arguments)
        .current_dir(folder)
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.success(),
        "cargo {}: {error}",
        arguments.join(" ")
    );
    Ok(output.stdout)
}

fn zstd_sources(metadata: &Value) -> Result<PathBuf> {
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata has no packages")?;
    let package = packages
        .iter()
        .find(|package| package["name"] == "zstd-sys");
    let manifest = package.and_then(|package| package["manifest_path"].as_str());
    let manifest = PathBuf::from(manifest.context("cargo metadata lists no zstd-sys")?);
    Ok(manifest.with_file_name("zstd").join("lib"))
}

/// Fewest C files to build.
const LEAST_FILES: usize = 12;
/// C files at scale 1.
const FILES: f64 = 20.0;

fn makefile(zstd: &Path, scale: f64) -> Result<String> {
    let mut all = Vec::new();
    for part in ["common", "compress", "decompress", "dictBuilder"] {
        let mut sources: Vec<PathBuf> = fs::read_dir(zstd.join(part))?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        sources.retain(|source| source.extension().is_some_and(|extension| extension == "c"));
        sources.sort();
        all.extend(sources);
    }
    ensure!(
        all.len() >= LEAST_FILES,
        "{} has no C sources",
        zstd.display()
    );
    let wanted = ((FILES * scale) as usize).clamp(LEAST_FILES, all.len());
    let mut objects = Vec::new();
    let mut rules = String::new();
    // Spread over all parts.
    for source in (0..wanted).map(|number| &all[number * all.len() / wanted]) {
        let stem = source.file_stem().unwrap_or_default().to_string_lossy();
        let object = format!("output/c/{stem}.o");
        rules += &format!(
            "{object}:\n\tcc -O3 -DZSTD_DISABLE_ASM -c {} -o {object}\n",
            source.display()
        );
        objects.push(object);
    }
    Ok(format!("all: {}\n{rules}", objects.join(" ")))
}

/// One line per object file and library below a folder: path and hash.
fn fingerprint(folder: &Path) -> Result<String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path
                .extension()
                .is_some_and(|extension| extension == "o" || extension == "rlib")
            {
                let mut hasher = DefaultHasher::new();
                fs::read(&path)?.hash(&mut hasher);
                found.insert(path, hasher.finish());
            }
        }
    }
    ensure!(
        !found.is_empty(),
        "nothing was built in {}",
        folder.display()
    );
    let line = |(path, hash): (&PathBuf, &u64)| format!("{} {hash:016x}", path.display());
    Ok(found.iter().map(line).collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smaller_scale_builds_fewer_files_of_every_part() {
        let folder = tempfile::tempdir().unwrap();
        for part in ["common", "compress", "decompress", "dictBuilder"] {
            fs::create_dir(folder.path().join(part)).unwrap();
            for number in 0..10 {
                let file = format!("{part}/{part}{number}.c");
                fs::write(folder.path().join(file), "").unwrap();
            }
        }
        let files = |scale| {
            let text = makefile(folder.path(), scale).unwrap();
            for part in ["common", "compress", "decompress", "dictBuilder"] {
                assert!(text.contains(&format!("/{part}/")), "{part}");
            }
            text.matches("cc -O3").count()
        };
        assert_eq!((files(0.01), files(1.0), files(9.0)), (12, 20, 40));
    }

    #[test]
    fn one_changed_byte_in_an_object_file_is_detected() {
        let folder = tempfile::tempdir().unwrap();
        assert!(fingerprint(folder.path()).is_err(), "nothing was built");
        let object = folder.path().join("one.o");
        fs::write(&object, b"machine code").unwrap();
        let before = fingerprint(folder.path()).unwrap();
        fs::write(folder.path().join("notes.txt"), b"ignored").unwrap();
        assert_eq!(fingerprint(folder.path()).unwrap(), before);
        fs::write(&object, b"machine c0de").unwrap();
        assert_ne!(fingerprint(folder.path()).unwrap(), before);
    }
}
