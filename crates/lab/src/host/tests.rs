use std::path::PathBuf;

use super::*;

#[test]
fn every_way_back_is_read_from_the_journal_as_it_was_written() {
    let ways = [
        Undo::RemoveGroup(PathBuf::from("/sys/fs/cgroup/memory/memfold-lab-1")),
        Undo::StopSwapping(PathBuf::from("/dev/zram7")),
        Undo::RemoveZram(7),
        Undo::WriteBack(
            PathBuf::from("/sys/module/zswap/parameters/enabled"),
            "N".into(),
        ),
        Undo::Delete(PathBuf::from("/tmp/memfold-lab-1.swap")),
    ];
    for way in ways {
        assert_eq!(Undo::from_json(&way.to_json()).unwrap(), way);
    }
    assert!(Undo::from_json(&serde_json::json!({ "format": "/dev/sda" })).is_err());
}

#[test]
fn only_what_the_lab_made_is_deleted() {
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
        .expect("what is gone already is no error");
}

#[test]
fn what_is_not_there_needs_no_way_back() {
    Undo::RemoveGroup(PathBuf::from("/sys/fs/cgroup/memory/memfold-lab-none"))
        .apply()
        .unwrap();
    Undo::StopSwapping(PathBuf::from("/dev/no-such-device"))
        .apply()
        .unwrap();
    Undo::RemoveZram(4_000_000_000).apply().unwrap();
}
