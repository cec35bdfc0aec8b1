//! What programs rely on besides the memory itself: statistics by name, errors with their causes.

use memfold::{Error, Memfold, Mode, Stats};
use std::error::Error as _;

#[test]
fn statistics_are_serialised_by_their_names() {
    let memfold = Memfold::builder().limit(8 << 20).build().unwrap();
    let stats = memfold.stats();
    let json = serde_json::to_value(stats).unwrap();
    assert_eq!(json["mode"], stats.mode.name());
    for (field, value) in Stats::FIELDS.iter().zip(stats.values()) {
        assert_eq!(json[field.name], value, "{}", field.name);
        assert!(!field.description.trim().is_empty(), "{}", field.name);
    }
    assert_eq!(
        json.as_object().unwrap().len(),
        Stats::FIELDS.len() + 1,
        "the mode and the fields"
    );
    assert_eq!(serde_json::from_value::<Stats>(json).unwrap(), stats);
}

/// Reporters that print the chain of sources would print the cause twice.
#[test]
fn an_error_does_not_repeat_its_source() {
    let cause = || std::io::Error::from_raw_os_error(libc::ENOMEM);
    let system = Error::System {
        action: "map a region",
        source: cause(),
    };
    for error in [system, Error::Pool(Box::new(cause()))] {
        let source = error.source().expect("the kernel's error").to_string();
        assert_eq!(source, cause().to_string());
        assert!(!error.to_string().contains(&source), "{error}");
    }
}

#[test]
fn what_a_program_holds_can_be_shown() {
    let memfold = Memfold::builder().mode(Mode::Signal).limit(8 << 20);
    assert!(format!("{memfold:?}").contains("Signal"));
    let memfold = memfold.build().unwrap();
    let mut region = memfold.map(1 << 20).unwrap();
    region.as_mut().fill(7);
    assert_eq!(region.as_ref()[5], 7);
    assert!(format!("{:?}", region.pin(..10).unwrap()).contains("length: 10"));
    assert!(format!("{:?}", region.pin_mut(..20).unwrap()).contains("length: 20"));
    let detached = region.pin_detached(..4096).unwrap();
    assert!(format!("{detached:?}").contains("pages: 0..1"));
    assert!(format!("{memfold:?}").contains("pinned_bytes: 4096"));
}
