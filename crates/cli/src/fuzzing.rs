//! What the fuzz target of `stat` runs on its input. A test runs the same on the corpus.

use crate::format::printable;
use crate::instance::Instance;
use crate::summary::{SummaryWhen, summary};

/// An answer to `memfold stat` and `memfold top`, from any process.
pub fn snapshot(input: &[u8]) {
    let Ok(mut instance) = serde_json::from_slice::<Instance>(input) else {
        return;
    };
    instance.map_text(printable);
    let (used, _) = instance.limit();
    match &instance {
        Instance::Run(run) => {
            assert!(used <= run.total_bytes());
            _ = summary(&run.command, &run.statistics, SummaryWhen::Always);
        }
        Instance::Disk(disk) => _ = disk.statistics.line(),
    }
    assert!(!instance.title().contains('\u{1b}'));
    assert!(instance.pid() == 0 || instance.is_meant(instance.pid(), false));
    assert!(serde_json::to_string_pretty(&instance).is_ok());
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
            understood += usize::from(serde_json::from_slice::<Instance>(&input).is_ok());
        }
        assert!(
            understood > 3,
            "the answers of the corpus lack a new counter"
        );
    }
}
