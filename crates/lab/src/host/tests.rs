use std::path::PathBuf;

use super::*;

#[test]
fn undo_round_trips_through_the_journal() {
    let undos = [
        Undo::RemoveGroup(PathBuf::from("/sys/fs/cgroup/memory/memfold-lab-1")),
        Undo::StopSwapping(PathBuf::from("/dev/zram7")),
        Undo::RemoveZram(7),
        Undo::WriteBack(
            PathBuf::from("/sys/module/zswap/parameters/enabled"),
            "N".into(),
        ),
        Undo::Delete(PathBuf::from("/tmp/memfold-lab-1.swap")),
    ];
    for undo in undos {
        assert_eq!(Undo::from_json(&undo.to_json()).unwrap(), undo);
    }
    assert!(Undo::from_json(&serde_json::json!({ "format": "/dev/sda" })).is_err());
}

#[test]
fn only_files_of_the_lab_are_deleted() {
    let folder = std::env::temp_dir();
    let other = folder.join(format!("not-memfold-lab-{}", std::process::id()));
    std::fs::write(&other, "precious").unwrap();
    assert!(Undo::Delete(other.clone()).apply().is_err());
    assert!(other.exists());
    std::fs::remove_file(&other).unwrap();

    let ours = folder.join(format!("memfold-lab-test-{}", std::process::id()));
    std::fs::write(&ours, "scratch").unwrap();
    Undo::Delete(ours.clone()).apply().unwrap();
    assert!(!ours.exists());
    Undo::Delete(ours)
        .apply()
        .expect("a missing file is no error");
}

#[test]
fn undoing_a_change_that_was_not_made_succeeds() {
    Undo::RemoveGroup(PathBuf::from("/sys/fs/cgroup/memory/memfold-lab-none"))
        .apply()
        .unwrap();
    Undo::StopSwapping(PathBuf::from("/dev/no-such-device"))
        .apply()
        .unwrap();
    Undo::RemoveZram(4_000_000_000).apply().unwrap();
}
