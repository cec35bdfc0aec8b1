//! What is written twice is the same.

use std::fs;
use std::path::Path;

/// A document of the repository, its white space made even.
fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(name);
    let text = fs::read_to_string(&path).expect("the repository has it");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The list that begins behind `before` and ends before `behind`.
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
