"""FirstForward: dry-runs a trial from the first forward pass of its training on, where its set-up could not be dry-run.

The trial runs for real until a model that is trained begins its first forward pass. There its process forks:

    this process    waits, and judges what the child has seen; then the forward pass goes on, or the trial ends
    the child       enters the stage in the middle of the objective, goes on with the user's code until all is seen, and ends

So the set-up happens once and may depend on values, but a trial that is pruned has paid for it.

The child has what the set-up has opened: files, sockets, memory that is shared. The seal makes all of that its own.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.optim.optimizer as _optimizer
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from perfguard.capture.child import (
    HAS_SENT,
    autograd_refuses_forks,
    await_child,
    child_sealed,
    compute_alone,
    fork,
    kill_tree,
    limit_stalls,
    shown,
    silence_output,
)
from perfguard.capture.loaders import batches_given
from perfguard.capture.seal import Seal, linux, remove_scratch
from perfguard.capture.trial import Watch, watching
from perfguard.exceptions import CaptureError
from perfguard.measure.run import status_of
from perfguard.pytorch import objects_of
from perfguard.workload import CapturedTrial

if TYPE_CHECKING:
    from perfguard.devices import Device


class FirstForward:
    """A ``with`` block in which an objective runs for real. It is judged at its first training forward pass.

    Args:
        device: the guarded device.
        judge: called once, with what the child has seen, or why it has seen nothing. What it raises ends the trial there, and
            again at each later forward pass, if the objective catches it.
        leave_study: called in the child before all else: what the objective reports from now on is to reach nobody.
        problem: why the trial was not dry-run before.
        most_seconds: how long the child may take.
        most_bytes: the most host memory that it may take beyond what this process has.
        most_tries: the number of models that are tried, if the dry run fails. The first may belong to the set-up.
        network: leave the network open in the child.
    """

    def __init__(
        self,
        device: Device,
        judge: Callable[[CapturedTrial | Exception], object],
        leave_study: Callable[[], object],
        *,
        problem: CaptureError,
        most_seconds: float = 60.0,
        most_bytes: int = 8 * 2**30,
        most_tries: int = 3,
        network: bool = False,
    ) -> None:
        self._device = device
        self._judge = judge
        self._leave_study = leave_study
        self._problem = problem
        self._most_seconds = most_seconds
        self._most_bytes = most_bytes
        self._tries_left = most_tries
        self._network = network
        self._is_judged = False
        self._ended: Exception | None = None
        """What has ended the trial."""
        self.set_up_s = 0.0
        """Seconds until the first forward pass, after which a model is trained."""
        self.waited_s = 0.0
        """Seconds that the trial has waited for the dry run and the verdict."""
        self._began_at = 0.0
        self._begun = batches_given()
        self._made_before = frozenset(map(id, objects_of(nn.Parameter)))
        self._tried: dict[int, weakref.ref[Any]] = {}
        """Models and optimizers from which on a dry run was tried, and the models' parts, by their ids."""
        self._thread = threading.get_ident()
        self._hooks = ExitStack()
        self._stage = ExitStack()
        self._sealing = ExitStack()
        self._watch: Watch
        self._seal: Seal
        self._pipe: Connection
        """To the process before."""
        self.child = 0
        """The number of this process, which ends with the block. 0: it is not the child."""

    def __enter__(self) -> FirstForward:
        self._began_at = time.monotonic()
        self._forward_hook = register_module_forward_pre_hook(self._before_forward)
        self._hooks.callback(self._forward_hook.remove)
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.child:
            self._end(error)
        self._hooks.close()
        if error is None and self._ended is not None:
            raise self._ended
        if not self._is_judged and status_of(error) in ("ok", "oom"):  # any other error has a reason of its own
            self._say(self._problem)

    def _is_looking(self) -> bool:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread or self.child:
            return False
        if self._ended is not None:
            raise self._ended
        return not self._is_judged

    def _was_tried(self, one: Any) -> bool:
        found = self._tried.get(id(one))
        return found is not None and found() is one  # the id of one that is gone may be that of the next

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not self._is_looking() or self._was_tried(module) or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            if (watch := self._dry_run()) is not None:
                watch.enter_module(module, args)
            else:
                self._tried.update((id(part), weakref.ref(part)) for part in module.modules())

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """A closure has the forward pass. So has every step of Lightning."""
        if not self._is_looking():
            return None
        watch = None if self._was_tried(optimizer) else self._dry_run()
        if watch is not None:
            return watch.before_step(optimizer, args, kwargs, depth=2)
        self._tried[id(optimizer)] = weakref.ref(optimizer)
        if not self._is_judged:
            self._say(self._problem)
        return None

    def _say(self, found: CapturedTrial | Exception) -> None:
        """Judge, once. After that nobody looks any longer, unless the trial goes on though it was ended."""
        self._is_judged = True
        try:
            self._judge(found)
        except Exception as error:
            self._ended = error
            raise
        self._forward_hook.remove()
        self._tried.clear()

    def _dry_run(self) -> Watch | None:
        """Fork, and judge what the child sees. Return, in the child, what watches the objective from now on."""
        is_one_of_many = torch.distributed.is_available() and torch.distributed.is_initialized()  # who would wait for this one
        if not self._tries_left or is_one_of_many:
            return None
        began = time.monotonic()
        self.set_up_s = self.set_up_s or began - self._began_at
        self._tries_left -= 1
        try:
            here, there = Pipe()
            child = fork(keeps_autograd=autograd_refuses_forks())
        except (OSError, CaptureError) as error:
            self._problem = CaptureError(f"{self._problem}; its process cannot be forked ({error})")
            return None
        if not child:
            return self._go_on(there)
        there.close()
        limit_stalls(here)
        with here:
            found = self._received(child, here)
        self.waited_s += time.monotonic() - began
        if not isinstance(found, CaptureError):
            self._say(found)
        elif f"{found}" not in f"{self._problem}":
            self._problem = CaptureError(f"{self._problem}; from a first forward pass on, {found}")
        return None

    def _received(self, child: int, pipe: Connection) -> CapturedTrial | Exception:
        found: list[CapturedTrial | Exception] = []

        def wait(seconds: float) -> None:
            if found:
                time.sleep(seconds)
            elif pipe.poll(seconds):
                with suppress(EOFError, OSError):
                    found.append(pipe.recv())

        try:
            problem = await_child(child, self._most_seconds, self._most_bytes, os.getppid(), wait)
        except BaseException:
            kill_tree(child)
            raise
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGTERM)  # processes that the objective has started
            remove_scratch(child)
        wait(0.0)
        if problem:  # it may hang in the same way again
            self._tries_left = 0
        return found[0] if found and not problem else CaptureError(problem or "the dry run has said nothing")

    # --- The child --------------------------------------------------------------------------------------------------------------

    def _go_on(self, pipe: Connection) -> Watch:
        """Enter the stage, on which the caller goes on."""
        self.child = os.getpid()
        self._pipe = pipe
        try:
            os.setpgid(0, 0)  # Ctrl-C is for the process that the user sees, which ends this group
            silence_output()
            self._leave_study()
            self._seal = self._sealing.enter_context(child_sealed([pipe.fileno()], network=self._network))
        except BaseException as error:
            pipe.send(CaptureError(f"its process cannot be sealed ({type(error).__name__}: {error})"))
            os._exit(HAS_SENT)
        try:
            with suppress(OSError):
                linux.prctl(linux.DIE_WITH_PARENT, signal.SIGKILL)
            compute_alone()
            # The step of an optimizer goes through its hooks, which must stay as they are until it is through.
            _optimizer._global_optimizer_pre_hooks = _optimizer._global_optimizer_pre_hooks.copy()
            self._watch = self._stage.enter_context(watching(self._device))
            self._watch.join(self._begun, self._made_before)
            gc.freeze()  # garbage is collected after each step; what was there before is none
        except BaseException as error:
            self._end(error)
        return self._watch

    def _end(self, error: BaseException | None) -> NoReturn:
        if os.getpid() != self.child:  # the objective has forked
            os._exit(0)

        def show() -> CapturedTrial:
            with self._stage:
                if error is not None:
                    raise error
            return self._watch.captured()

        try:
            with self._sealing:
                self._pipe.send(shown(show, self._seal, "captured at the first forward pass"))
        finally:
            os._exit(HAS_SENT)
