//! Scans: which pages are cold, and where they go.

use zsmalloc::PageSource;

use super::{Chosen, Haste, MigrateReport};
use crate::{
    entry::{Position, TierKind},
    migrator::Migrator,
    scratch::Scratch,
    slot::{CLUSTER_SLOTS, ClusterId},
    space::SwapSpace,
    sync::lock,
};

/// The tiers from which pages leave memory.
const TO_WRITE_BACK: [TierKind; 4] = [
    TierKind::Compressed,
    TierKind::Recompressed,
    TierKind::Uncompressed,
    TierKind::Block,
];
/// The tiers from which pages are recompressed; of blocks, those that are to be taken apart.
const TO_RECOMPRESS: [TierKind; 2] = [TierKind::Compressed, TierKind::Block];

/// What a [scan](SwapSpace::scan) does with cold pages: those not loaded during the given number of
/// scans before it, 1 to [`MAX_AGE`](crate::MAX_AGE).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScanPolicy {
    /// Recompress them with the stronger algorithm, together with neighbours.
    pub recompress: Option<u8>,
    /// Write them to the file, or send them to the store on other machines, after they were
    /// recompressed, or at once if they are not to be. No effect without such a tier.
    pub write_back: Option<u8>,
}

impl ScanPolicy {
    /// Where to move a page of this age. `is_sparse`: it is in a block that is to be taken apart.
    fn target(self, tier: TierKind, age: u8, is_sparse: bool) -> Option<Target> {
        let is_due = |least: Option<u8>| least.is_some_and(|least| age >= least.max(1));
        let is_dense = match tier {
            TierKind::Compressed => false,
            TierKind::Block => !is_sparse,
            _ => true,
        };
        let leaves = TO_WRITE_BACK.contains(&tier) && is_due(self.write_back);
        // A block that does not get smaller is not taken apart, at none of the scans until its pages leave.
        let leaves_block = tier == TierKind::Block && leaves;
        if !is_dense && is_due(self.recompress) && !leaves_block {
            return Some(Target::Recompressed);
        }
        leaves.then_some(Target::Outside)
    }
}

/// What a scan moves.
#[derive(Debug, Clone, Copy)]
struct Cold {
    policy: ScanPolicy,
    haste: Haste,
}

/// Where a scan moves a page.
enum Target {
    Recompressed,
    /// Out of memory.
    Outside,
}

impl<S: PageSource> SwapSpace<S> {
    /// Examines about `budget` slots from where the last scan stopped, moves the pages that the
    /// policy calls cold, and increments the age of all others.
    ///
    /// Call it at intervals: the age of a page is the number of scans through the space since it
    /// was last stored or loaded.
    pub fn scan(&self, policy: ScanPolicy, budget: usize, scratch: &mut Scratch) -> MigrateReport {
        let mut report = MigrateReport::default();
        let mut migrator = lock(&self.migrator);
        let mut policy = policy;
        if self.targets_outside().is_empty() {
            policy.write_back = None;
        }
        for _ in 0..budget.div_ceil(CLUSTER_SLOTS) {
            let Some(cluster) = self.next_to_scan(&mut migrator) else {
                report.finished = true;
                break;
            };
            let cold = Cold {
                policy,
                haste: Haste::Background,
            };
            self.scan_cluster(&mut migrator, cluster, cold, scratch, &mut report);
        }
        report
    }

    /// The same for a caller that needs room now: moves cold pages into blocks
    /// ([`blocks_for_room`](crate::SwapConfig::blocks_for_room)), and takes blocks apart of which any page is gone. A
    /// scan that is under way gives way.
    pub fn scan_for_room(&self, budget: usize, scratch: &mut Scratch) -> MigrateReport {
        let mut report = MigrateReport::default();
        let mut migrator = self.wanted_migrator();
        let cold = Cold {
            policy: ScanPolicy {
                recompress: Some(1),
                write_back: None,
            },
            haste: Haste::Wanted,
        };
        for _ in 0..budget.div_ceil(CLUSTER_SLOTS) {
            let Some(cluster) = self.next_to_scan(&mut migrator) else {
                report.finished = true;
                break;
            };
            self.scan_cluster(&mut migrator, cluster, cold, scratch, &mut report);
        }
        report
    }

    /// The cluster at which scans go on; `None` at the end of the space, once.
    fn next_to_scan(&self, migrator: &mut Migrator) -> Option<ClusterId> {
        let cluster = ClusterId(migrator.next.max(1));
        if self.allocator.is_past_end(cluster) {
            migrator.next = 1;
            return None;
        }
        migrator.next = cluster.0 + 1;
        Some(cluster)
    }

    /// Slots of one scan through the whole space.
    pub fn scan_length(&self) -> usize {
        self.allocator.clusters_used() * CLUSTER_SLOTS
    }

    /// Makes room in the pool: moves pages that take about `bytes` there to the file, or to the store
    /// on other machines, least recently stored or loaded first.
    ///
    /// A second-chance clock: pages used since the hand last passed are skipped once.
    /// [`finished`](MigrateReport::finished) is set after two revolutions. Stops at the first page
    /// that they refuse.
    pub fn write_back(&self, bytes: u64, scratch: &mut Scratch) -> MigrateReport {
        let mut report = MigrateReport::default();
        if self.targets_outside().is_empty() {
            report.finished = true;
            return report;
        }
        let mut migrator = self.wanted_migrator();
        let policy = ScanPolicy {
            recompress: None,
            write_back: Some(1),
        };
        let mut to_look_at = 2 * self.allocator.clusters_used() + 1;
        while report.bytes_before < bytes && report.store_error.is_none() {
            let cluster = ClusterId(migrator.next_written.max(1));
            if self.allocator.is_past_end(cluster) {
                migrator.next_written = 1;
            } else {
                migrator.next_written = cluster.0 + 1;
                let cold = Cold {
                    policy,
                    haste: Haste::Wanted,
                };
                self.scan_cluster(&mut migrator, cluster, cold, scratch, &mut report);
            }
            to_look_at -= 1;
            if to_look_at == 0 {
                report.finished = true;
                break;
            }
            migrator = self.pass_to_loads(migrator);
        }
        report
    }

    /// Ages the pages of a cluster and moves the cold ones.
    fn scan_cluster(
        &self,
        migrator: &mut Migrator,
        cluster: ClusterId,
        cold: Cold,
        scratch: &mut Scratch,
        report: &mut MigrateReport,
    ) {
        self.allocator.walk(cluster, || {
            let mut recompress = Vec::new();
            let mut write_back = Vec::new();
            for index in 0..CLUSTER_SLOTS {
                let slot = cluster.slot(index);
                let cell = self.table.entry(slot);
                let Some(Position { tier, location }) = cell.load().position() else {
                    continue;
                };
                report.looked_at += 1;
                // Slots freed meanwhile have no age.
                let Some(age) = cell.grow_older() else {
                    continue;
                };
                let is_sparse = tier == TierKind::Block
                    && match cold.haste {
                        Haste::Background => self.blocks.is_sparse(location),
                        Haste::Wanted => !self.blocks.is_whole(location),
                    };
                match cold.policy.target(tier, age, is_sparse) {
                    Some(Target::Outside) => write_back.push(slot),
                    Some(Target::Recompressed) => recompress.push(slot),
                    None => {}
                }
            }
            let recompress = Chosen {
                slots: &recompress,
                from: &TO_RECOMPRESS,
                to: &[TierKind::Recompressed],
                haste: cold.haste,
            };
            let outside = self.targets_outside();
            let write_back = Chosen {
                slots: &write_back,
                from: &TO_WRITE_BACK,
                to: &outside,
                haste: cold.haste,
            };
            for chosen in [recompress, write_back] {
                // If one fails, the other may succeed.
                let before = report.store_error.take();
                self.move_pages(migrator, chosen, scratch, report);
                report.store_error = report.store_error.or(before);
            }
        });
    }
}

/// What Miri cannot run.
#[cfg(test)]
mod with_codec {
    use super::*;
    use crate::{PAGE_SIZE, SwapConfig, sync::atomic::Ordering::Relaxed};
    use zsmalloc::HeapSource;

    #[test]
    fn a_scan_gives_way_to_who_waits_for_the_migrator() {
        let config = SwapConfig {
            pool_capacity_pages: 1 << 10,
            max_slots: 1 << 10,
            ..SwapConfig::default()
        };
        let space = SwapSpace::new(HeapSource::new(), config).unwrap();
        let mut scratch = Scratch::new();
        for seed in 0..64_u8 {
            // Shorter together.
            let page: [u8; PAGE_SIZE] = std::array::from_fn(|at| {
                (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ (at as u8 & seed)
            });
            space.store(&page, &mut scratch).unwrap();
        }
        let policy = ScanPolicy {
            recompress: Some(1),
            write_back: None,
        };
        space.scan(policy, usize::MAX, &mut scratch);
        space.migrator_wanted.store(1, Relaxed);
        assert_eq!(space.scan(policy, usize::MAX, &mut scratch).moved, 0);
        space.migrator_wanted.store(0, Relaxed);
        assert!(space.scan(policy, usize::MAX, &mut scratch).moved > 0);
    }
}
