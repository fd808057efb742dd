"""Calls of every kernel in one table: op, sizes, dtype and options.

ops.py contains the function and the arrays of each op, and case.py defines a case. SMALL are cases
that can run, LARGE cases of models' sizes, and smoke.py contains each public op once. The tests of
every kernel and of every op read the same table (tests/helpers).
"""

from scripts.cases.large import LARGE as LARGE
from scripts.cases.small import SMALL as SMALL

CASES = SMALL | LARGE
