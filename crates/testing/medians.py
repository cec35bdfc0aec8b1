"""Medians of measurements: lines of CONTESTANT FIGURE VALUE in a file become a line for each figure and
contestant, with the median, the least and the most."""

import collections
import statistics
import sys

figures = collections.defaultdict(list)
for line in open(sys.argv[1]):
    contestant, figure, value = line.split()
    figures[figure, contestant].append(float(value))
for (figure, contestant), values in sorted(figures.items()):
    print(f"{figure:22} {contestant:17} {statistics.median(values):12.2f}  ({min(values):.2f} to {max(values):.2f})")
