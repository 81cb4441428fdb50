"""Random numbers of the user's, which PerfGuard must not use up."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_numbers_kept(*, beside_threads: bool = False) -> Iterator[None]:
    """What is drawn inside, on the host, is given back.

    Meta tensors draw nothing, so there is something to give back only where a model draws on the host by itself. While other
    threads run it is not given back, for they would see the same numbers twice; ``beside_threads`` it is, for what is short and
    happens once.
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
