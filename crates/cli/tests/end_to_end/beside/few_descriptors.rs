//! Hard limits on descriptors that are too low for a run.

use crate::support::memfold;
use std::process::Command;

#[test]
fn a_run_with_too_few_descriptors_says_so_or_works() {
    beside!(&["bash", "timeout"]);
    for (limit, starts) in [(20, false), (30, false), (40, false), (256, true)] {
        let script =
            format!("ulimit -n {limit}; timeout -k 1 20 \"$0\" run --limit 64M -- echo hi");
        let output = Command::new("bash")
            .args(["-c", &script])
            .arg(memfold())
            .output()
            .expect("bash runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        if starts {
            assert!(output.status.success(), "{limit}: {errors}");
            continue;
        }
        assert_eq!(output.status.code(), Some(125), "{limit}: {errors}");
        assert!(output.stdout.is_empty(), "{limit}: the program was started");
        assert!(errors.contains("ulimit -n"), "{limit}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{limit}: {errors}");
    }
}
