"""The server of dry runs imports what dry runs import, so that the next child of it finds it imported.

An objective may import a library itself. The server does not have it then, so each dry run would pay for the import again. A
module may have effects as it is imported. So the server imports one only if all of this holds:

- it is of an installed package, which does not change between trials, as the user's own files may;
- a dry run has imported it, so there it does no harm;
- the process of the study has imported it too, in a trial that ran, so its effects have happened already.

The questions that a library asks of CUDA as it is imported have the answers that a dry run gives, and reach no driver.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfguard.devices import Device


def imported_since(before: Collection[str]) -> tuple[str, ...]:
    """Return the modules of installed packages that this process has imported since it had ``before``, in that order."""
    return tuple(name for name in [*sys.modules] if name not in before and _is_installed(name))


def _is_installed(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    # A module may stand under another name, too, and one that answers each question with an object has no such text.
    origin = getattr(spec, "origin", None)
    return isinstance(origin, str) and "site-packages" in origin and getattr(spec, "name", None) == name


def preload(names: Iterable[str], device: Device) -> None:
    """Import those of the modules that this process does not have. One that cannot be imported is left to the dry run.

    Args:
        names: from :func:`imported_since`.
        device: the guarded device, for which CUDA answers.
    """
    from perfguard.capture.cuda import missing_functions, pretend_cuda  # they import PyTorch, as the server has
    from perfguard.graph.libraries import replacing

    with ExitStack() as stack:
        if device.kind == "cuda":
            stack.enter_context(missing_functions())
            pretend_cuda(replacing(stack), device, lambda graph: None)
        for name in names:
            if name not in sys.modules:
                with suppress(Exception, SystemExit):
                    import_module(name)
