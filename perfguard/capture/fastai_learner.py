"""fastai in a dry run: its loader and its optimizer, which are not PyTorch's, and the steps that a Learner will make.

The search for a learning rate is left out, as those of Lightning are. fastai 2.8.
"""

from __future__ import annotations

import collections
import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfguard.graph.op import Phase
from perfguard.pytorch import hook_optimizers_of_fastai

if TYPE_CHECKING:
    from perfguard.capture.loaders import Loaders
    from perfguard.graph.libraries import Replace
    from perfguard.graph.recorder import Recorder


class Loader:
    """fastai's loader in the words of PyTorch's.

    Args:
        inner: what fastai's loader gives PyTorch's iterator to read from.
    """

    def __init__(self, inner: Any) -> None:
        self.dataset = Samples(inner.d)
        self.collate_fn = inner.d.do_batch
        self.batch_size = inner.d.bs
        self.batch_sampler = None
        self.num_workers = inner.num_workers
        self.prefetch_factor = inner.prefetch_factor
        self.pin_memory = inner.pin_memory
        self.persistent_workers = inner.persistent_workers
        self._loader = inner.d

    def __len__(self) -> int:
        return len(self._loader)


class Samples:
    """What a loader of fastai makes batches of. An iterable one has none."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.n if self._loader.indexed and self._loader.n else 0

    def __getitem__(self, index: int) -> Any:
        return self._loader.do_item(index)


def follow_fastai(replace: Replace, loaders: Loaders, recorder: Recorder, read_alone: Callable[[Any], Any]) -> None:
    """Follow fastai, if it is imported. Call it again where it may be by now.

    Args:
        replace: see :func:`replacing`.
        loaders: learn of its loaders and its steps.
        recorder: learns when its optimizers work.
        read_alone: returns an iterator over a loader that starts no worker.
    """
    load, optimizer, learner = (sys.modules.get(f"fastai.{name}") for name in ("data.load", "optimizer", "learner"))
    if not hasattr(learner, "Learner") or hasattr(learner.Learner._do_fit, "__wrapped__"):  # type: ignore[union-attr]
        return

    def begin(inner: Any) -> Any:
        loader = Loader(inner)
        loaders.load(loader, "begins")
        iterator = read_alone(inner)
        iterator._loader = loader
        return iterator

    def as_optimizer(own: Any) -> Any:
        def zero_grad(self: Any) -> None:
            with recorder.in_phase(Phase.OPTIMIZER):
                own(self)

        return zero_grad

    hook_optimizers_of_fastai()
    replace(load, "_loaders", lambda _: (begin, begin))
    replace(optimizer.Optimizer, "zero_grad", as_optimizer)  # type: ignore[union-attr]
    replace(learner.Learner, "_do_fit", lambda own: _saying_steps(own, loaders))  # type: ignore[union-attr]
    replace(learner.Learner, "fine_tune", lambda own: _saying_all_steps(own, loaders))  # type: ignore[union-attr]
    replace(learner.Learner, "lr_find", lambda _: _finding_no_rate)  # type: ignore[union-attr]


def begun_anew(iterator: Any) -> Any:
    """Return an iterator over what a loader of fastai reads with ``iterator``, from the first batch on. None: it is none."""
    load = sys.modules.get("fastai.data.load")
    is_own = load is not None and isinstance(iterator._dataset, load._FakeLoader)
    return load._loaders[0](iterator._dataset) if is_own else None  # type: ignore[union-attr]


def _saying_steps(own: Any, loaders: Loaders) -> Any:
    @functools.wraps(own)
    def _do_fit(self: Any) -> None:
        _state_steps(self, self.n_epoch, loaders)
        own(self)

    return _do_fit


def _saying_all_steps(own: Any, loaders: Loaders) -> Any:
    """Its first part may be all that the dry run comes to."""

    @functools.wraps(own)
    def fine_tune(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(own).bind(self, *args, **kwargs)
        given.apply_defaults()
        _state_steps(self, given.arguments["epochs"] + given.arguments["freeze_epochs"], loaders)
        self._states_steps = True
        own(self, *args, **kwargs)
        self._states_steps = False

    return fine_tune


def _state_steps(learner: Any, num_epochs: int, loaders: Loaders) -> None:
    names = {kind.__name__ for callback in learner.cbs for kind in type(callback).__mro__}
    if "GradientAccumulation" not in names and not getattr(learner, "_states_steps", False):
        number = None if "EarlyStoppingCallback" in names else num_epochs * len(learner.dls.train)
        loaders.state_steps(object(), number)


def _finding_no_rate(self: Any, *args: Any, suggest_funcs: Any = (), **kwargs: Any) -> Any:
    """A rate changes no step, and the losses that would tell it are 0."""
    functions: Any = suggest_funcs if isinstance(suggest_funcs, (tuple, list)) else (suggest_funcs,)
    names = [str(getattr(one, "func", one).__name__) for one in functions if one is not None] or ["valley"]
    return collections.namedtuple("SuggestedLRs", names)(*[self.lr] * len(names))
