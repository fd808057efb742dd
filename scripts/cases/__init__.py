"""Calls of every kernel, as one table: op, sizes, dtype and options.

ops.py has the function and the arrays of each op, case.py what a case is. SMALL are cases that can
be run, LARGE those of sizes that models have, and smoke.py has each public op once. The tests of
every kernel and of every op read the same table (tests/helpers).
"""

from scripts.cases.large import LARGE as LARGE
from scripts.cases.small import SMALL as SMALL

CASES = SMALL | LARGE
