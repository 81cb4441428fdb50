"""The seal of a dry run: nothing that its process does, or that a program does which it starts, changes anything outside.

The strongest rung of the ladder that the system allows holds:

    namespaces   a private copy-on-write view of all files, and a network of its own         `view.py`
    landlock     the kernel refuses writes and sockets; Python's functions are redirected    `landlock.py`, `redirect.py`
    python       Python's functions are redirected, and its audit events refuse the rest     `redirect.py`, `audit.py`

On all rungs, what the process has inherited becomes its own (`inherited.py`), trackers are off (`trackers.py`), files of weights
are small (`weights.py`), and programs that it starts are limited (`programs.py`).
"""

from perfguard.capture.seal.inherited import adopt_orphans, leave_databases
from perfguard.capture.seal.ladder import RUNGS, Rung, Seal, explain, remove_scratch, sealed
from perfguard.capture.seal.programs import StartsTrainingError

__all__ = [
    "RUNGS",
    "Rung",
    "Seal",
    "StartsTrainingError",
    "adopt_orphans",
    "explain",
    "leave_databases",
    "remove_scratch",
    "sealed",
]
