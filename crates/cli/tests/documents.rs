//! The documents agree with each other and with the sources.

use memfold_pager::{Now, Totals};
use memfold_testing::files;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The most lines of the README: what a reader takes in before deciding.
const README_LINES: usize = 150;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(name: &str) -> String {
    let path = repository().join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A document with its white space made even.
fn document(name: &str) -> String {
    read(name).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The part of a text between two others.
fn between<'a>(text: &'a str, before: &str, behind: &str) -> &'a str {
    let start = text.find(before).expect("its beginning") + before.len();
    let length = text[start..].find(behind).expect("its end");
    text[start..start + length].trim()
}

#[test]
fn readme_and_security_guarantee_the_same() {
    let (readme, security) = (document("README.md"), document("SECURITY.md"));
    let heading = "a test compares them.";
    let guarantees = between(&security, heading, "## Who may attack");
    assert!(guarantees.matches("- **").count() >= 5, "{guarantees}");
    assert!(
        readme.contains(guarantees),
        "README.md differs from SECURITY.md"
    );
}

#[test]
fn the_readme_is_short() {
    let lines = read("README.md").lines().count();
    assert!(lines <= README_LINES, "README.md has {lines} lines");
}

/// The documents in which links are followed.
fn linked_documents() -> Vec<PathBuf> {
    let root = repository();
    let mut documents = files(&root.join("docs"), ".md");
    for name in [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "ARCHITECTURE.md",
        "crates/lab/README.md",
    ] {
        documents.push(root.join(name));
    }
    documents
}

/// Where the links of a document lead, outside of its code.
fn links(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut targets = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        if is_code {
            continue;
        }
        for part in line.split("](").skip(1) {
            let target = part.split(')').next().unwrap_or_default();
            targets.push(target.to_owned());
        }
    }
    targets
}

/// The name by which a heading is linked to.
fn anchor(heading: &str) -> String {
    let words = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = words.chars().filter_map(|letter| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        letter => letter.is_alphanumeric().then_some(letter),
    });
    kept.collect()
}

#[test]
fn links_lead_somewhere() {
    let mut checked = 0;
    for document in linked_documents() {
        let text = fs::read_to_string(&document).expect("a document");
        for link in links(&text) {
            if link.contains("://") {
                continue;
            }
            follow(&document, document.parent().expect("a folder"), &link);
            checked += 1;
        }
    }
    assert!(checked > 20, "{checked} links were found");
}

/// Fails if a document's link, which is relative to a folder, leads nowhere.
fn follow(document: &Path, folder: &Path, link: &str) {
    let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
    let target = match file {
        "" => document.to_owned(),
        file => folder.join(file),
    };
    let place = format!("{} links to {link}", document.display());
    assert!(
        target.exists(),
        "{place}, which is not in {}",
        folder.display()
    );
    if !fragment.is_empty() {
        let text = fs::read_to_string(&target).expect("a document");
        let mut headings = text.lines().filter(|line| line.starts_with('#'));
        let is_there = headings.any(|line| anchor(line) == fragment);
        assert!(is_there, "{place}: no such heading");
    }
}

/// crates.io follows relative links from the package's folder, wherever its README lies, and `PyPI` follows none.
#[test]
fn links_of_published_packages_lead_somewhere() {
    let root = repository();
    let mut packages = vec![(root.join("bindings/python"), "README.md".to_owned())];
    for folder in fs::read_dir(root.join("crates")).expect("the crates") {
        let folder = folder.expect("a crate").path();
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
        let readme = manifest
            .lines()
            .find_map(|line| line.strip_prefix("readme = "));
        if let Some(readme) = readme {
            packages.push((folder, readme.trim_matches('"').to_owned()));
        }
    }
    assert!(packages.len() > 6, "{packages:?}");
    for (folder, readme) in packages {
        let readme = folder.join(readme);
        for link in links(&fs::read_to_string(&readme).expect("a README")) {
            let online = ["blob", "raw"].iter().find_map(|view| {
                link.strip_prefix(&format!("https://github.com/memfold/memfold/{view}/main/"))
            });
            if let Some(link) = online {
                follow(&readme, &root, link.trim_end_matches("?sanitize=true"));
            } else if !link.contains("://") {
                assert!(
                    !folder.ends_with("python"),
                    "PyPI would not follow {link} of {}",
                    readme.display()
                );
                follow(&readme, &folder, &link);
            }
        }
    }
}

/// Names of fields that are locks, `Mutex` or `RwLock`, and of those that are set once.
fn fields(text: &str, types: &[&str]) -> BTreeSet<String> {
    let field = |line: &str| {
        let line = line.trim_start();
        let line = match line.strip_prefix("pub(") {
            Some(rest) => rest.split_once(") ")?.1,
            None => line.strip_prefix("pub ").unwrap_or(line),
        };
        let (name, kind) = line.split_once(": ")?;
        let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        let is_declared = line.ends_with(',') && types.iter().any(|start| kind.starts_with(start));
        (is_name && is_declared).then(|| name.to_owned())
    };
    text.lines().filter_map(field).collect()
}

/// The names in a text between single back quotes, and the first words of the lines of its diagram.
fn names(text: &str) -> BTreeSet<String> {
    let quoted = text.split('`').skip(1).step_by(2);
    let drawn = between(text, "```\n", "```").lines().filter_map(|line| {
        let line = line.trim_start_matches(|c: char| !c.is_ascii_alphabetic());
        line.split_whitespace().next()
    });
    let is_field = |name: &&str| name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    let all = quoted.chain(drawn).filter(|name| !name.is_empty());
    all.filter(is_field).map(str::to_owned).collect()
}

#[test]
fn the_lock_order_names_every_lock_of_the_pager() {
    let design = read("docs/design.md");
    let order = between(&design, "### Lock order", "## 6.");
    let documented = names(order);
    let (mut locks, mut known) = (BTreeSet::new(), BTreeSet::new());
    for file in files(&repository().join("crates/pager/src"), ".rs") {
        // The library's engine has an order of its own, in its module; the simulation's model is no part of it.
        let is_apart = |name: &str| file.components().any(|part| part.as_os_str() == name);
        if is_apart("embedded") || is_apart("simulation") {
            continue;
        }
        let text = fs::read_to_string(&file).expect("a source");
        locks.extend(fields(&text, &["Mutex<", "RwLock<"]));
        known.extend(fields(&text, &["OnceLock<"]));
        // What is called like a lock and is none: the gate, and the way into a relative's.
        known.extend(["gate", "try_shared"].map(str::to_owned));
    }
    known.extend(["sys", "swap", "zsmalloc"].map(str::to_owned));
    assert!(locks.len() > 15, "{locks:?}");
    let missing: Vec<_> = locks.difference(&documented).collect();
    assert!(missing.is_empty(), "not in the lock order: {missing:?}");
    known.extend(locks);
    let unknown: Vec<_> = documented.difference(&known).collect();
    assert!(unknown.is_empty(), "no lock of the pager: {unknown:?}");
}

/// All sources of the repository's crates.
fn sources() -> String {
    let files = files(&repository().join("crates"), ".rs");
    let texts = files.iter().map(fs::read_to_string);
    texts.map(|text| text.expect("a source")).collect()
}

/// Whether a text has a name, and not as a part of a longer one.
fn has_word(text: &str, word: &str) -> bool {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part)
    })
}

/// The names that the rows of a table begin with.
fn rows(table: &str) -> BTreeSet<&str> {
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    rows.filter_map(|row| row.split('`').nth(1)).collect()
}

#[test]
fn every_statistic_is_documented() {
    let statistics = read("docs/statistics.md");
    let (of_the_run, of_now) = statistics
        .split_once("## `memfold stat --json`")
        .expect("a section on what runs now");
    for (table, fields) in [(of_the_run, Totals::FIELDS), (of_now, Now::FIELDS)] {
        let documented = rows(table);
        for field in fields {
            let name = field.name;
            assert!(documented.contains(name), "docs/statistics.md lacks {name}");
        }
    }
}

/// What looks like a path or a name of ours is in the sources, or is one of the kernel's.
#[test]
fn identifiers_in_the_design_are_in_the_sources() {
    const OF_THE_KERNEL: [&str; 6] = [
        "epoll_wait",
        "MADV_COLLAPSE",
        "MADV_SOFT_OFFLINE",
        "PF_FORKNOEXEC",
        "RLIMIT_NPROC",
        "sched_yield",
    ];
    let sources = sources();
    let is_identifier = |text: &str| {
        text.contains(['_', ':'])
            && text.split("::").all(|part| {
                let mut letters = part.chars();
                letters
                    .next()
                    .is_some_and(|c| c.is_alphabetic() || c == '_')
                    && letters.all(|c| c.is_alphanumeric() || c == '_')
            })
    };
    let mut checked = 0;
    for document in ["docs/design.md", "docs/testing.md", "ARCHITECTURE.md"] {
        let text = read(document);
        // Drawings have backticks in pairs as well.
        for name in text
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|name| is_identifier(name))
        {
            let last = name.rsplit("::").next().unwrap_or(name);
            let is_there = OF_THE_KERNEL.contains(&name) || has_word(&sources, last);
            assert!(is_there, "{document} names {name}");
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked} names were found");
}

/// What a text of Rust calls, functions and macros, in small letters.
fn calls(text: &str) -> BTreeSet<&str> {
    let called = text.match_indices('(').filter_map(|(at, _)| {
        let before = text[..at].strip_suffix('!').unwrap_or(&text[..at]);
        let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
        let name = before.rsplit(|letter| !is_part(letter)).next()?;
        name.starts_with(|letter: char| letter.is_lowercase())
            .then_some(name)
    });
    called.collect()
}

/// What a contributor copies compiles, as far as names tell.
#[test]
fn what_examples_for_contributors_call_is_in_the_sources() {
    const OF_OTHERS: [&str; 3] = ["any", "assert_eq", "fuzz_target"];
    let (sources, text) = (sources(), read("CONTRIBUTING.md"));
    let mut checked = 0;
    for block in text.split("```rust\n").skip(1) {
        let block = block.split("```").next().unwrap_or_default();
        for name in calls(block)
            .into_iter()
            .filter(|name| !OF_OTHERS.contains(name))
        {
            let defined = ["fn", "macro_rules!"].map(|word| format!("{word} {name}"));
            let is_there = |text: &str| defined.iter().any(|one| has_word(text, one));
            assert!(
                is_there(&sources) || is_there(&text),
                "CONTRIBUTING.md calls {name}"
            );
            checked += 1;
        }
    }
    assert!(checked > 10, "{checked} names were found");
}

#[test]
fn what_is_documented_is_in_the_sources() {
    let sources = sources();
    let design = read("docs/design.md");
    let mut checked = 0;
    let transitions = between(&design, "| from → to |", "\n\n").lines().skip(2);
    for cell in transitions.filter_map(|row| row.split('|').nth(4)) {
        for name in cell.split('`').skip(1).step_by(2) {
            let name = name.rsplit("::").next().unwrap_or(name);
            assert!(has_word(&sources, &format!("fn {name}")), "no fn {name}");
            checked += 1;
        }
    }
    let invariants = between(&design, "| # | always |", "\n\n").lines().skip(2);
    for cell in invariants.filter_map(|row| row.split('|').nth(4)) {
        for name in cell.split('`').skip(1).step_by(2) {
            let found = match name.strip_suffix('*') {
                Some(start) => sources.contains(&format!("fn {start}")),
                None if Path::new(name).extension().is_some() => continue,
                None => has_word(&sources, name),
            };
            assert!(found, "no test {name}");
            checked += 1;
        }
    }
    let statistics = read("docs/statistics.md");
    for name in rows(&statistics) {
        assert!(has_word(&sources, name), "no statistic {name}");
        checked += 1;
    }
    assert!(checked > 80, "{checked} names were found");
}
