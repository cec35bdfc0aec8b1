//! The files of every crate import each other in one direction: a circle of imports means that none of
//! its files can be understood, or tested, without the others. A module and its submodules count as one
//! place.

use memfold_testing::files;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Which modules each module of a crate imports, by paths such as `supervised::fault::serve`.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The module that a file holds; empty for the crate's root.
fn module_of(root: &Path, file: &Path) -> String {
    let relative = file.strip_prefix(root).expect("a file of the crate");
    let mut parts: Vec<String> = relative
        .with_extension("")
        .components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    if parts
        .last()
        .is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main"))
    {
        parts.pop();
    }
    parts.join("::")
}

/// The code of a file without comments and test modules.
fn code_of(file: &Path) -> String {
    const TESTS: &str = "#[cfg(test)]\nmod tests";
    const FUZZING: &str = "#[cfg(any(test, feature = \"fuzzing\"))]\npub(crate) mod fuzzing {";
    let text = fs::read_to_string(file).expect("the file can be read");
    let text = text.split(TESTS).next().unwrap_or_default();
    let text = text.split(FUZZING).next().unwrap_or_default();
    let code = |line: &str| line.split("//").next().unwrap_or_default().to_owned();
    text.lines().map(code).collect::<Vec<_>>().join("\n")
}

/// The paths that a use tree such as `crate::a::{b, c::{d}}` names.
fn expand(tree: &str, prefix: &str, found: &mut Vec<String>) {
    let packed = |text: &str| text.split_whitespace().collect::<String>();
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or_default();
        found.push(format!("{prefix}{}", packed(path)));
        return;
    };
    let prefix = format!("{prefix}{}", packed(&tree[..open]));
    let close = tree.rfind('}').filter(|close| *close > open);
    let inner = &tree[open + 1..close.unwrap_or(tree.len())];
    let (mut depth, mut start) = (0, 0);
    for (place, letter) in inner.char_indices().chain([(inner.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = inner[start..place].trim();
                if !part.is_empty() {
                    expand(part, &prefix, found);
                }
                start = place + 1;
            }
            _ => {}
        }
    }
}

/// All paths that begin at the crate or a parent, in use items and elsewhere.
fn paths_of(code: &str) -> Vec<String> {
    let mut paths = Vec::new();
    // Items begin their line; text in messages does not count.
    for (at, _) in code.match_indices("use ") {
        let line = code[..at].rsplit('\n').next().unwrap_or_default().trim();
        if line.is_empty() || line.starts_with("pub") {
            let item = &code[at + 4..];
            let end = item.find(';').unwrap_or(item.len());
            expand(&item[..end], "", &mut paths);
        }
    }
    let of_path = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let path = &code[at..];
            let end = path.find(|letter| !of_path(letter)).unwrap_or(path.len());
            // What ends so begins a use tree, which was read above.
            if !path[..end].ends_with("::") {
                paths.push(path[..end].to_owned());
            }
        }
    }
    paths
}

/// The module among `modules` that a path named in `module` belongs to.
fn resolve(path: &str, module: &str, modules: &BTreeSet<String>) -> Option<String> {
    let mut parts: Vec<&str> = path.split("::").collect();
    let mut base: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
    match parts[0] {
        "crate" => base.clear(),
        "super" | "self" => {}
        _ => return None,
    }
    while parts
        .first()
        .is_some_and(|part| matches!(*part, "crate" | "self" | "super"))
    {
        if parts.remove(0) == "super" {
            base.pop();
        }
    }
    base.extend(parts);
    (1..=base.len())
        .rev()
        .map(|length| base[..length].join("::"))
        .find(|name| modules.contains(name))
}

fn imports_of(root: &Path) -> Imports {
    let files = files(root, ".rs");
    let modules: BTreeSet<String> = files.iter().map(|file| module_of(root, file)).collect();
    let is_inside = |one: &str, other: &str| one.starts_with(&format!("{other}::"));
    let import = |file: &PathBuf| {
        let module = module_of(root, file);
        let paths = paths_of(&code_of(file));
        let named = paths
            .iter()
            .filter_map(|path| resolve(path, &module, &modules));
        let others = named.filter(|other| {
            *other != module && !is_inside(other, &module) && !is_inside(&module, other)
        });
        (module.clone(), others.collect())
    };
    files.iter().map(import).collect()
}

/// Follows imports depth first; the part of `path` that closes a circle, if one does.
fn visit(
    module: &str,
    imports: &Imports,
    path: &mut Vec<String>,
    done: &mut BTreeSet<String>,
) -> Option<Vec<String>> {
    if let Some(at) = path.iter().position(|one| one == module) {
        return Some(path[at..].to_vec());
    }
    if !done.insert(module.to_owned()) {
        return None;
    }
    path.push(module.to_owned());
    let mut next = imports.get(module).into_iter().flatten();
    let found = next.find_map(|other| visit(other, imports, path, done));
    path.pop();
    found
}

/// A circle of modules, if there is one.
fn circle(imports: &Imports) -> Option<Vec<String>> {
    let mut done = BTreeSet::new();
    imports
        .keys()
        .find_map(|module| visit(module, imports, &mut Vec::new(), &mut done))
}

#[test]
fn no_crate_has_a_circle_of_imports() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the folder of crates");
    let mut checked = 0;
    for entry in fs::read_dir(crates).expect("the folder of crates") {
        let root = entry.expect("the folder of crates").path().join("src");
        if root.is_dir() {
            let found = circle(&imports_of(&root));
            assert_eq!(found, None, "a circle of imports in {}", root.display());
            checked += 1;
        }
    }
    assert!(checked >= 8, "only {checked} crates were found");
}

#[test]
fn a_circle_is_found() {
    let imports = |pairs: &[(&str, &[&str])]| -> Imports {
        let owned = |(module, others): &(&str, &[&str])| {
            let others = others.iter().map(|other| (*other).to_owned());
            ((*module).to_owned(), others.collect())
        };
        pairs.iter().map(owned).collect()
    };
    let straight = imports(&[("a", &["b"]), ("b", &["c"]), ("c", &[])]);
    assert_eq!(circle(&straight), None);
    let round = imports(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"])]);
    assert_eq!(circle(&round), Some(vec!["b".to_owned(), "c".to_owned()]));
}

#[test]
fn paths_are_read_from_use_trees_and_expressions() {
    let code = "use crate::{a::{b, c as d}, e};\nfn f() { crate::g::h(); super::i::J }";
    let mut found = paths_of(code);
    found.sort();
    found.dedup();
    let expected = [
        "crate::a::b",
        "crate::a::c",
        "crate::e",
        "crate::g::h",
        "super::i::J",
    ];
    assert_eq!(found, expected);
    let modules = ["x", "x::y", "x::i", "g"].map(str::to_owned).into();
    let resolved = |path| resolve(path, "x::y", &modules);
    assert_eq!(resolved("super::i::J").as_deref(), Some("x::i"));
    assert_eq!(resolved("crate::g::h").as_deref(), Some("g"));
    assert_eq!(resolved("std::io"), None);
}
