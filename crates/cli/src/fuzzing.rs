//! What the fuzz target of `stat` runs on its input. A test runs the same on the corpus.

use crate::report::Snapshot;
use crate::summary::{SummaryWhen, summary};

/// An answer to `memfold stat` and `memfold top`, from any process.
pub fn snapshot(input: &[u8]) {
    let Ok(snapshot) = serde_json::from_slice::<Snapshot>(input) else {
        return;
    };
    let (held, _) = snapshot.limit();
    assert!(held <= snapshot.total_bytes());
    _ = summary(&snapshot.command, &snapshot.statistics, SummaryWhen::Always);
    assert!(serde_json::to_string_pretty(&snapshot).is_ok());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_may_be_anything() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/snapshot");
        let mut understood = 0;
        for input in std::fs::read_dir(folder).expect("the corpus") {
            let input = std::fs::read(input.expect("an input").path()).expect("its bytes");
            snapshot(&input);
            understood += usize::from(serde_json::from_slice::<Snapshot>(&input).is_ok());
        }
        assert!(
            understood > 1,
            "the answers of the corpus lack a new counter"
        );
    }
}
