//! Bugs of the kernel's `UFFDIO_MOVE` that are known, by the version that fixed them.

use super::{Check, read_line, swap_areas};
use crate::huge::Setting;

/// A kernel's version: 6.12.41 is `(6, 12, 41)`.
type Version = (u32, u32, u32);

/// What must be so for a bug to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trigger {
    /// The host swaps: the page that is moved is in the kernel's swap cache.
    HostSwap,
    /// Programs have huge pages, and the kernel migrates one while a part of it is moved.
    HugePages,
    /// A page is pinned while it is moved, for example by a driver.
    Pinned,
}

struct Bug {
    name: &'static str,
    effect: &'static str,
    trigger: Trigger,
    /// The first version that has it fixed in each series that was still maintained, the newest last.
    fixed: &'static [Version],
}

/// All of them since 6.8, which brought `UFFDIO_MOVE`. The versions are the kernel's own.
const BUGS: &[Bug] = &[
    Bug {
        name: "CVE-2024-27007",
        effect: "a page may be moved while it is pinned",
        trigger: Trigger::Pinned,
        fixed: &[(6, 9, 0)],
    },
    Bug {
        name: "CVE-2025-21984",
        effect: "the kernel may stop with an error",
        trigger: Trigger::HostSwap,
        fixed: &[(6, 12, 20), (6, 13, 8), (6, 14, 0)],
    },
    Bug {
        name: "CVE-2025-38242",
        effect: "a page may be lost or the kernel stop",
        trigger: Trigger::HostSwap,
        fixed: &[(6, 12, 37), (6, 15, 5), (6, 16, 0)],
    },
    Bug {
        name: "a move beside a migration entry",
        effect: "the kernel may stop with an error",
        trigger: Trigger::HugePages,
        fixed: &[(6, 12, 43), (6, 17, 0)],
    },
];

impl Bug {
    fn is_in(&self, version: Version) -> bool {
        let series = (version.0, version.1);
        let of_series = self.fixed.iter().find(|fixed| (fixed.0, fixed.1) == series);
        let newest = self.fixed.last();
        of_series.or(newest).is_some_and(|fixed| version < *fixed)
    }
}

/// Whether this kernel has such bugs, and whether they can show on this host.
pub(super) fn check() -> Check {
    let release = read_line("/proc/sys/kernel/osrelease").unwrap_or_default();
    let may_show = |trigger: Trigger| match trigger {
        Trigger::HostSwap => swap_areas() > 0,
        Trigger::HugePages => Setting::global() != Some(Setting::Never),
        Trigger::Pinned => true,
    };
    of_release(&release, may_show)
}

fn of_release(release: &str, may_show: impl Fn(Trigger) -> bool) -> Check {
    const NAME: &str = "uffdio-move-bugs";
    let Some(version) = version_of(release) else {
        return Check::note(NAME, format!("unknown for Linux {release:?}"), None);
    };
    let present: Vec<&Bug> = BUGS.iter().filter(|bug| bug.is_in(version)).collect();
    if present.is_empty() {
        return Check::note(NAME, "none known of this version", None);
    }
    let names = |bugs: &[&Bug]| -> String {
        let names: Vec<String> = bugs
            .iter()
            .map(|bug| format!("{} ({})", bug.name, bug.effect))
            .collect();
        names.join(", ")
    };
    let (now, later): (Vec<&Bug>, Vec<&Bug>) =
        present.into_iter().partition(|bug| may_show(bug.trigger));
    if now.is_empty() {
        let found = format!(
            "{} in {release}, if the distribution has not fixed it; not without {} here",
            names(&later),
            needs(&later)
        );
        return Check::note(NAME, found, None);
    }
    let found = format!(
        "{} in {release}, if the distribution has not fixed it",
        names(&now)
    );
    Check::note(NAME, found, Some(&remedy(&now)))
}

fn needs(bugs: &[&Bug]) -> &'static str {
    match bugs {
        [bug, ..] if bug.trigger == Trigger::HostSwap => "swap of the host",
        [bug, ..] if bug.trigger == Trigger::HugePages => "huge pages",
        _ => "pinned pages",
    }
}

fn remedy(bugs: &[&Bug]) -> String {
    let has = |trigger| bugs.iter().any(|bug| bug.trigger == trigger);
    let mut remedy = "boot a newer kernel".to_owned();
    if has(Trigger::HostSwap) {
        remedy.push_str(", or `sudo swapoff -a`");
    }
    if has(Trigger::HugePages) {
        remedy.push_str(", or `echo never | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`");
    }
    remedy
}

/// The numbers of a release such as "6.12.41+deb13-amd64" or "6.8.0-45-generic". Without a third one, the
/// series' first release.
fn version_of(release: &str) -> Option<Version> {
    let end = release.find(|c: char| !(c.is_ascii_digit() || c == '.'));
    let mut numbers = release[..end.unwrap_or(release.len())].split('.');
    let mut next = || numbers.next()?.parse().ok();
    let (major, minor) = (next()?, next()?);
    Some((major, minor, next().unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(release: &str) -> Vec<&'static str> {
        let version = version_of(release).expect("a version");
        let present = BUGS.iter().filter(|bug| bug.is_in(version));
        present.map(|bug| bug.name).collect()
    }

    #[test]
    fn versions_are_read_as_distributions_write_them() {
        assert_eq!(version_of("6.12.41+deb13-amd64"), Some((6, 12, 41)));
        assert_eq!(version_of("6.8.0-45-generic"), Some((6, 8, 0)));
        assert_eq!(version_of("7.1"), Some((7, 1, 0)));
        assert_eq!(version_of("6.17-rc1"), Some((6, 17, 0)));
        assert_eq!(version_of("linux"), None);
        assert_eq!(version_of(""), None);
    }

    #[test]
    fn each_series_has_what_was_not_fixed_in_it() {
        let migration = "a move beside a migration entry";
        let (swap, race) = ("CVE-2025-21984", "CVE-2025-38242");
        assert_eq!(names("6.8.12"), ["CVE-2024-27007", swap, race, migration]);
        assert_eq!(names("6.11.2"), [swap, race, migration]);
        assert_eq!(names("6.12.19"), [swap, race, migration]);
        assert_eq!(names("6.12.20"), [race, migration]);
        assert_eq!(names("6.12.41+deb13-amd64"), [migration]);
        assert!(names("6.12.43").is_empty());
        assert_eq!(names("6.13.8"), [race, migration]);
        assert_eq!(names("6.14.11"), [race, migration]);
        assert_eq!(names("6.15.5"), [migration]);
        assert_eq!(names("6.16.1"), [migration]);
        assert!(names("6.17.0").is_empty());
        assert!(names("7.3.1").is_empty());
    }

    #[test]
    fn a_remedy_is_named_where_a_bug_can_show() {
        let quiet = of_release("6.12.30", |_| false);
        assert!(quiet.remedy.is_none() && quiet.found.contains("not without swap"));
        let swapping = of_release("6.12.30", |trigger| trigger == Trigger::HostSwap);
        let remedy = swapping.remedy.expect("a remedy");
        assert!(remedy.contains("swapoff -a"), "{remedy}");
        assert!(!remedy.contains("hugepage"), "{remedy}");
        assert!(swapping.found.contains("CVE-2025-38242"));
        let huge = of_release("6.16.0", |_| true).remedy.expect("a remedy");
        assert!(huge.contains("transparent_hugepage/enabled"), "{huge}");
        assert_eq!(
            of_release("6.18.5", |_| true).found,
            "none known of this version"
        );
    }
}
