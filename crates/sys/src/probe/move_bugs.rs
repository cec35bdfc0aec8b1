//! Bugs of the kernel's `UFFDIO_MOVE` that are known, by the version that fixed them, and what is done about them.
//!
//! Distributions fix bugs without changing the version, so no kernel is refused: where a bug may show, pages are taken
//! away by `mremap`, unless [`WITH_MOVE`] is `1`. Programs are started without huge pages where those are what a bug takes;
//! one that runs already may have some. Nothing avoids pinned pages.

use super::try_move::works;
use super::{Check, read_line, swap_areas};
use crate::huge::Setting;
use std::ffi::OsStr;
use std::fmt;

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

/// Set to `1` in the environment, it has memfold use `UFFDIO_MOVE` whatever bugs this version of the kernel has, for those whose
/// distribution has fixed them.
pub const WITH_MOVE: &str = "MEMFOLD_WITH_MOVE";

/// Whose pages are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Managed {
    /// Of what is started without huge pages where that matters.
    Started,
    /// Of a program that runs already.
    Attached,
}

/// Those that this kernel may have, and that can show on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MoveBugs {
    /// Programs should get no huge pages.
    pub of_huge_pages: bool,
    /// Why pages are not to be moved by `UFFDIO_MOVE`; none if they may be.
    pub forbid: Option<Forbidden>,
}

/// Bugs because of which `UFFDIO_MOVE` is not to be used here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forbidden {
    release: String,
    bugs: String,
    remedy: String,
}

/// For who takes pages away otherwise.
impl fmt::Display for Forbidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Forbidden {
            release,
            bugs,
            remedy,
        } = self;
        write!(
            f,
            "UFFDIO_MOVE of Linux {release} has {bugs}, so pages are taken away by mremap, which takes longer: {remedy}, or, if \
             its distribution has fixed it, set {WITH_MOVE}=1"
        )
    }
}

impl Forbidden {
    /// For who has begun to use it before its bugs could show.
    #[must_use]
    pub fn while_in_use(&self) -> String {
        let Forbidden {
            release,
            bugs,
            remedy,
        } = self;
        format!(
            "the host swaps now, and UFFDIO_MOVE of Linux {release} has {bugs}: {remedy}, or start this anew, and pages are \
             taken away by mremap"
        )
    }
}

/// The bugs to avoid, where `UFFDIO_MOVE` works.
#[must_use]
pub fn move_bugs(of: Managed) -> MoveBugs {
    if works() {
        known_bugs(of)
    } else {
        MoveBugs::default()
    }
}

/// The same by the kernel's version alone, for callers that have tried `UFFDIO_MOVE` or are about to.
#[must_use]
pub fn known_bugs(of: Managed) -> MoveBugs {
    let bugs = to_avoid((&release(), of), may_show);
    unless_allowed(bugs, std::env::var_os(WITH_MOVE).as_deref())
}

/// Forbids nothing where the value of [`WITH_MOVE`] is `1`. Any other leaves the bugs avoided.
fn unless_allowed(bugs: MoveBugs, value: Option<&OsStr>) -> MoveBugs {
    if value == Some(OsStr::new("1")) {
        MoveBugs {
            forbid: None,
            ..bugs
        }
    } else {
        bugs
    }
}

/// What is to be avoided of a release where everything may show.
#[must_use]
pub fn bugs_of(release: &str, managed: Managed) -> MoveBugs {
    to_avoid((release, managed), |_| true)
}

fn to_avoid((release, managed): (&str, Managed), may_show: impl Fn(Trigger) -> bool) -> MoveBugs {
    let present = present_in(version_of(release));
    let of = |trigger| {
        let bugs = present.iter().copied();
        let bugs: Vec<&Bug> = bugs.filter(|bug| bug.trigger == trigger).collect();
        (!bugs.is_empty() && may_show(trigger)).then_some(bugs)
    };
    let of_huge_pages = of(Trigger::HugePages);
    let mut forbid = of(Trigger::HostSwap).unwrap_or_default();
    if managed == Managed::Attached {
        forbid.extend(of_huge_pages.iter().flatten());
    }
    MoveBugs {
        of_huge_pages: of_huge_pages.is_some(),
        forbid: (!forbid.is_empty()).then(|| Forbidden {
            release: release.to_owned(),
            bugs: names(&forbid),
            remedy: remedy(&forbid),
        }),
    }
}

/// Whether this kernel has such bugs, and whether they can show on this host.
pub(super) fn check() -> Check {
    if works() {
        of_release(&release(), may_show)
    } else {
        Check::note(NAME, "UFFDIO_MOVE is not used", None)
    }
}

const NAME: &str = "uffdio-move-bugs";

fn release() -> String {
    read_line("/proc/sys/kernel/osrelease").unwrap_or_default()
}

fn may_show(trigger: Trigger) -> bool {
    match trigger {
        Trigger::HostSwap => swap_areas() > 0,
        Trigger::HugePages => Setting::global() != Some(Setting::Never),
        Trigger::Pinned => true,
    }
}

/// All of them before Linux 6.8, and where the version is unknown: a distribution that brought `UFFDIO_MOVE` to an older
/// kernel took it from any newer one, with what was fixed by then.
fn present_in(version: Option<Version>) -> Vec<&'static Bug> {
    let may_have = |bug: &&Bug| version.is_none_or(|version| bug.is_in(version));
    BUGS.iter().filter(may_have).collect()
}

fn names(bugs: &[&Bug]) -> String {
    let names: Vec<String> = bugs
        .iter()
        .map(|bug| format!("{} ({})", bug.name, bug.effect))
        .collect();
    names.join(", ")
}

fn of_release(release: &str, may_show: impl Fn(Trigger) -> bool) -> Check {
    let present = present_in(version_of(release));
    if present.is_empty() {
        return Check::note(NAME, "none known of this version", None);
    }
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
    let mut found = format!(
        "{} in {release}, if the distribution has not fixed it",
        names(&now)
    );
    let any = |trigger| now.iter().any(|bug| bug.trigger == trigger);
    if any(Trigger::HostSwap) {
        found.push_str("; pages are taken away by mremap");
    } else if any(Trigger::HugePages) {
        found.push_str("; programs are started without huge pages, and pages of attached ones taken away by mremap");
    }
    let remedy = format!(
        "{}, or, if its distribution has fixed it, set {WITH_MOVE}=1",
        remedy(&now)
    );
    Check::note(NAME, found, Some(&remedy))
}

fn needs(bugs: &[&Bug]) -> &'static str {
    match bugs {
        [bug, ..] if bug.trigger == Trigger::HostSwap => "swap of the host",
        [bug, ..] if bug.trigger == Trigger::HugePages => "huge pages",
        _ => "pinned pages",
    }
}

fn remedy(bugs: &[&Bug]) -> String {
    let mut remedy = "boot a newer kernel".to_owned();
    if bugs.iter().any(|bug| bug.trigger == Trigger::HostSwap) {
        remedy.push_str(", or `sudo swapoff -a`");
    }
    remedy
}

/// The numbers of a release such as "6.12.41+deb13-amd64" or "6.8.0-45-generic". Without a third one, the
/// series' first release.
pub(super) fn version_of(release: &str) -> Option<Version> {
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
        present_in(Some(version))
            .iter()
            .map(|bug| bug.name)
            .collect()
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
        assert_eq!(names("5.14.0-611.el9.x86_64"), names("6.8.0"));
    }

    #[test]
    fn only_1_allows_what_has_bugs() {
        let forbids = |value: Option<&str>| {
            let bugs = bugs_of("6.12.30", Managed::Started);
            let bugs = unless_allowed(bugs, value.map(OsStr::new));
            assert!(bugs.of_huge_pages, "{value:?}");
            bugs.forbid.is_some()
        };
        assert!(!forbids(Some("1")));
        for value in [None, Some(""), Some("0"), Some("no"), Some("10")] {
            assert!(forbids(value), "{value:?}");
        }
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
        let huge = of_release("6.16.0", |_| true);
        assert!(huge.found.contains("without huge pages"), "{huge:?}");
        assert_eq!(
            of_release("6.18.5", |_| true).found,
            "none known of this version"
        );
    }

    #[test]
    fn triggers_are_kept_away_from_kernels_that_have_the_bug() {
        let of = |release| bugs_of(release, Managed::Started);
        let bugs = of("6.12.30");
        assert!(bugs.of_huge_pages);
        let swap = bugs.forbid.expect("a reason").to_string();
        assert!(
            swap.contains("CVE-2025-38242") && swap.contains("swapoff"),
            "{swap}"
        );
        let of_migration = MoveBugs {
            of_huge_pages: true,
            forbid: None,
        };
        assert_eq!(of("6.16.3"), of_migration);
        let attached = bugs_of("6.16.3", Managed::Attached);
        let huge = attached.forbid.expect("a reason").to_string();
        assert!(
            huge.contains("migration") && !huge.contains("swapoff"),
            "{huge}"
        );
        for release in ["6.12.43", "6.18.1"] {
            assert_eq!(of(release), MoveBugs::default(), "{release}");
        }
        // What a distribution brought to an older kernel may be of any newer one.
        for release in ["5.14.0-611.el9.x86_64", "unknown"] {
            let bugs = of(release);
            let swap = bugs.forbid.expect("a reason").while_in_use();
            assert!(bugs.of_huge_pages && swap.contains(release), "{swap}");
        }
        assert_eq!(
            to_avoid(("6.12.30", Managed::Attached), |_| false),
            MoveBugs::default()
        );
    }
}
