"""Random numbers of the user's, which PerfGuard must not use up."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_numbers_kept(*, beside_threads: bool = False) -> Iterator[None]:
    """Restore the host's random state after the block.

    Meta tensors draw nothing, so this matters only if a model itself draws on the host. While other threads run, the state is
    not restored, because they would see the same numbers twice. With ``beside_threads`` it is restored all the same, for a
    short block that runs once.
    """
    import torch

    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    before = torch.get_rng_state(), random.getstate(), numpy_random.get_state() if numpy_random else None
    try:
        yield
    finally:
        if beside_threads or threading.active_count() == 1:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            if numpy_random:
                numpy_random.set_state(before[2])
