//! What memfold uses of newer kernels where they have it, and what it does on others.

use super::Check;
use crate::memory::kernel_frees_locked;
use crate::owned_uffd::{kernel_poisons, kernel_reads_now, kernel_tracks_accesses};
use crate::process::{kernel_finds_mappings, kernel_scans, kernel_seals, kernel_shows_guards};
use crate::socket::{kernel_hands_out_peers, kernel_withholds_descriptors};

struct Feature {
    name: &'static str,
    /// The first Linux that has it.
    since: &'static str,
    is_there: fn() -> bool,
    /// What is done without it, or what that costs.
    without: &'static str,
}

const FEATURES: &[Feature] = &[
    Feature {
        name: "MADV_DONTNEED_LOCKED",
        since: "5.18",
        is_there: kernel_frees_locked,
        without: "memfold does not lock its own memory, which the host may swap out",
    },
    Feature {
        name: "SO_PEERPIDFD",
        since: "6.5",
        is_there: kernel_hands_out_peers,
        without: "programs are opened by PID, while they stay connected",
    },
    Feature {
        name: "UFFDIO_POISON",
        since: "6.6",
        is_there: kernel_poisons,
        without: "if memfold dies, what shares the memory of a program that ended may wait for ever at a page that is out",
    },
    Feature {
        name: "PAGEMAP_SCAN",
        since: "6.7",
        is_there: kernel_scans,
        without: "page maps are read page by page",
    },
    Feature {
        name: "mseal",
        since: "6.10",
        is_there: kernel_seals,
        without: "a hostile program can hold up its run",
    },
    Feature {
        name: "userfaultfd reads that never wait",
        since: "6.10",
        is_there: kernel_reads_now,
        without: "a hostile program can hold up its run",
    },
    Feature {
        name: "PROCMAP_QUERY",
        since: "6.11",
        is_there: kernel_finds_mappings,
        without: "all mappings are listed to find one",
    },
    Feature {
        name: "PAGE_IS_GUARD",
        since: "6.16",
        is_there: kernel_shows_guards,
        without: "where a thread's stack has a guard region (MADV_GUARD_INSTALL), its joiner may wait for ever",
    },
    Feature {
        name: "SO_PASSRIGHTS",
        since: "6.16",
        is_there: kernel_withholds_descriptors,
        without: "another user of the host can have programs that change their user run unmanaged",
    },
    Feature {
        name: "UFFDIO_RWPROTECT",
        since: "7.3",
        is_there: kernel_tracks_accesses,
        without: "--track-accesses has no effect",
    },
];

pub(super) fn check() -> Check {
    of_missing(FEATURES.iter().filter(|feature| !(feature.is_there)()))
}

fn of_missing<'a>(missing: impl Iterator<Item = &'a Feature>) -> Check {
    const NAME: &str = "newer-kernels";
    let missing: Vec<String> = missing
        .map(|feature| {
            let Feature {
                name,
                since,
                without,
                ..
            } = feature;
            format!("no {name} (Linux {since}): {without}")
        })
        .collect();
    if missing.is_empty() {
        return Check::note(NAME, "all that memfold uses is there", None);
    }
    Check::note(NAME, missing.join("; "), None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::move_bugs::version_of;
    use crate::probe::{read_line, status_field};

    #[test]
    fn what_is_missing_is_named_with_what_is_done_instead() {
        assert_eq!(
            of_missing([].iter()).found,
            "all that memfold uses is there"
        );
        let all = of_missing(FEATURES.iter());
        for feature in FEATURES {
            assert!(all.found.contains(feature.name) && all.found.contains(feature.without));
            assert!(version_of(feature.since).is_some());
        }
    }

    #[test]
    fn this_kernel_has_what_its_version_says() {
        let release = read_line("/proc/sys/kernel/osrelease").unwrap();
        let version = version_of(&release);
        let filtered = status_field("Seccomp:").is_none_or(|mode| mode.trim() != "0");
        let (Some(version), false) = (version, filtered) else {
            memfold_testing::skip("a numbered kernel without a seccomp filter");
            return;
        };
        for feature in FEATURES {
            // A distribution may have brought one to an older kernel.
            let is_due = version >= version_of(feature.since).unwrap();
            assert!((feature.is_there)() || !is_due, "{}", feature.name);
        }
        let missing = FEATURES.iter().filter(|feature| !(feature.is_there)());
        assert_eq!(check(), of_missing(missing));
    }
}
