//! What the help of the subcommands says after the options.

/// Of the whole program.
pub const EXAMPLES: &str = "\
Examples:
  memfold-lab chain
  memfold-lab table --threads 1,2 --runs 3
  memfold-lab growth --scale 0.2
  sudo memfold-lab kernel --workload munmap-256:recorded --against zram:lz4,memfold
  sudo memfold-lab report --out report --scale 0.2      one page of most, about 20 minutes

A LIST is separated by commas. Figures are medians of alternated rounds; spread is the largest
sample over the smallest. Exit status: 0 on success; 1 if `simulate` found a history that fails; 125
if an experiment failed, with a one-line error; 128 + N if signal N ended it, after the host was
restored.";

/// Of `kernel`.
pub const KERNEL_NOTES: &str = "\
Backends: native, zram:lz4, zram:lzo-rle (or any other zram compressor), zswap, memfold,
memfold-total (memfold in as many bytes as the program's anonymous memory and zram took together in the
same round, all of memfold's own memory included), memfold-embedded (the library; only in the workloads
`embedded-…`).

The cgroup's limit under zram and zswap counts page cache, page tables and slab, too; memfold's counts
anonymous memory alone. peak_counted_mib is anonymous memory and pool, sampled, for both.

Workloads and groups: munmap (munmap-64 to munmap-512), swap (page-out,
swap-in-sequential, swap-in-random), embedded, usemem, memhog, zipf, exit, programs (cpython, node,
numpy, sort, sqlite, c++, java, go, luajit, pypy, erlang, racket, r, ocaml, haskell), redis-get, redis-get-bgsave, build, overhead; summary: those of docs/measurements.md.
NAME:N selects the case with N processes, NAME:DATA the one with phrases or recorded contents.

zram and zswap need root, and no other swap in use. Swap, cgroups and zswap's parameters are
restored afterwards, also after Ctrl-C or a crash.

Examples:
  sudo memfold-lab kernel --workload munmap-256:recorded --against zram:lz4,memfold
  sudo memfold-lab kernel --workload cpython,redis-get --scale 0.3 --runs 3
  memfold-lab kernel --workload usemem --against native,memfold --json > usemem.json";

/// Of `report`.
pub const REPORT_NOTES: &str = "\
Writes DIR/index.html, which loads no external resources, its plots as SVG and every run as JSON.
Without --runs, long workloads run 3 times and the others 5 times; with --markdown all run 5 times
and Redis 15 times, as its rounds vary most.

Examples:
  sudo memfold-lab report --out report --scale 0.2
  sudo memfold-lab report --out report --experiments kernel --workload munmap,cpython
  memfold-lab report --out again --from report/chain.json,report/kernel-cpython.json
  sudo memfold-lab report --out figures --markdown       the table of docs/measurements.md";

/// Of `growth`.
pub const GROWTH_NOTES: &str = "\
Programs visit all of their pages, of which a quarter may be resident, and verify each byte. The
small case and one that is larger in a single dimension run in turn. Columns and goals are below the
table. Needs a C compiler, and at scale 1 about 12 GiB of memory: a case for which there is too little
is left out with a note.

Examples:
  memfold-lab growth --scale 0.2
  memfold-lab growth --dimension processes,mappings --runs 9
  memfold-lab growth --dimension bytes --megabytes 8192 --json > growth.json";
