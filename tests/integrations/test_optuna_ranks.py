"""Several processes run one trial together: rank 0 judges, all prune together, and no rank waits for ever for another."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from queue import Empty
from typing import Any

import optuna
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from perfguard.exceptions import ConfigurationError, UnguardedTrialWarning
from perfguard.log import MeasurementStore
from perfguard.workload import Workload
from perfguard_optuna import PerfGuardPruner, guarded, ranks, repair_of
from tests.doubles import TOY_CPU
from tests.integrations.one_layer import (
    LARGE,
    SMALL,
    build,
    make_guard,
    make_pruner,
    plain_study_of,
    settings,
    study_of,
    train,
    train_model,
)

integration = pytest.importorskip("optuna_integration")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

LIMIT_S = 250
"""A rank that has not ended by then hangs. The group's own limit is longer, so that it cannot hide one.

On a busy machine, two ranks that import Transformers take 100 s to begin.
"""


def ends_of(number: int, main: Callable[..., list[str]], *args: Any) -> list[Any]:
    """Run ``main(rank, *args)`` in so many processes. Return what each returned, what it raised, or its exit code."""
    processes, _, ends = group_of(number, (main, args), None)
    until = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hanging
    found: dict[int, Any] = {rank: process.exitcode for rank, process in enumerate(processes)}
    try:
        while True:
            rank, end = ends.get(timeout=0.2)
            found[rank] = end
    except Empty:
        return [found[rank] for rank in range(number)]


Together = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def together() -> Iterator[Together]:
    """As `ends_of(2, ...)`, but one group plays all that it is asked, because most of a play is its start.

    It is for plays that count the same trials on both ranks, and that make no dry run.
    """
    processes, asked, ends = group_of(2)

    def play_it(main: Callable[..., list[str]], *args: Any) -> list[Any]:
        assert all(process.is_alive() for process in processes), "an earlier play has ended the group"
        for questions in asked:
            questions.put((main, args))
        try:
            found = dict(ends.get(timeout=LIMIT_S) for _ in processes)
        except Empty:
            for process in processes:
                process.kill()
            raise
        return [found[rank] for rank in range(2)]

    yield play_it
    for process, questions in zip(processes, asked, strict=True):
        questions.put(None)
        process.join(10)
        process.kill()


def group_of(number: int, *plays: tuple[Callable[..., list[str]], tuple[Any, ...]] | None) -> tuple[list[Any], list[Any], Any]:
    """Start the processes of a group. Return them, where each is asked for plays, first for these, and where they answer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # else each process would import torch
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    asked: list[Any] = [context.Queue() for _ in range(number)]
    for questions in asked:
        for one in plays:
            questions.put(one)
    ends: Any = context.Queue()
    processes = [context.Process(target=_be, args=(rank, number, port, ends, asked[rank])) for rank in range(number)]
    for process in processes:
        process.start()
    return processes, asked, ends


def _be(rank: int, number: int, port: int, ends: Any, asked: Any) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), PERFGUARD_QUIET="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=number, timeout=datetime.timedelta(seconds=600))
    while (question := asked.get()) is not None:
        main, args = question
        ranks.LONGEST_WAIT_S = 3.0 if out_of_memory_on_rank_1 in args else 1000.0  # elsewhere, to wait for a rank is to hang
        try:
            ends.put((rank, main(rank, *args)))
        except Exception as error:
            ends.put((rank, f"{type(error).__name__}: {error}"))
    if rank == 0:  # which keeps the store
        time.sleep(0.5)


def play(rank: int, objective: Callable[[Any], float], *widths: int, **options: Any) -> list[str]:
    """The usual pattern: rank 0 has the study, and the others call the objective equally often."""
    if rank == 0:
        study = plain_study_of(*widths, **options)
        study.optimize(objective, n_trials=len(widths))
        return [trial.state.name for trial in study.trials]
    ends = []
    for _ in widths:
        try:
            objective(None)
        except optuna.TrialPruned:
            ends.append("PRUNED")
        else:
            ends.append("COMPLETE")
    return ends


def train_together(width: int, *, after_step: Callable[[int], object] = lambda _: None) -> float:
    return train_model(DistributedDataParallel(nn.Linear(64, width)), num_steps=4, after_step=after_step)


def inline(rank: int, log: str, after_step: Callable[[int, int], object], *widths: int, **options: Any) -> list[str]:
    guard = make_guard(**{"gpu": TOY_CPU, "log": log} | options)

    def objective(single: optuna.Trial | None) -> float:
        trial = integration.TorchDistributedTrial(single)
        width = trial.suggest_int("width", SMALL, LARGE)
        with guard.trial(trial, nn.Linear(64, width), (32, 64), loss=torch.mean) as run:
            value = train_together(width, after_step=lambda step: after_step(rank, step))
        assert run.verdict.action == "launch"
        assert run.measurement is not None
        assert run.num_steps == 4
        return value

    return play(rank, objective, *widths)


def nothing(rank: int, step: int) -> None:
    pass


def test_all_ranks_prune_together_inline(tmp_path: Path) -> None:
    """It hung for 75 s, or ended the ranks: 'TorchDistributedTrial' object has no attribute 'study'."""
    log = str(tmp_path / "log.db")
    assert ends_of(4, inline, log, nothing, SMALL, LARGE, SMALL) == 4 * [["COMPLETE", "PRUNED", "COMPLETE"]]
    records = MeasurementStore(log).records()
    assert sorted(record.verdict.action for record in records if record.verdict) == ["launch", "launch", "prune"]
    assert [record.status for record in records].count("ok") == 2


_held: list[torch.Tensor] = []


def greedy_and_slow_on_rank_1(rank: int, step: int) -> None:
    if rank == 1:
        _held.append(torch.ones(2**22))  # 16 MiB
    time.sleep(0.05 * rank)


def test_one_row_has_the_largest_memory_and_the_slowest_step(together: Together, tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    assert together(inline, log, greedy_and_slow_on_rank_1, SMALL) == 2 * [["COMPLETE"]]
    (record,) = MeasurementStore(log).records()
    assert record.measured["memory"] > 4 * 2**24
    assert record.measured["step_time"] > 0.05


def test_no_rank_hangs_when_the_verdict_raises_inline(together: Together) -> None:
    ended = ends_of(4, unjudgeable, True)
    assert all("UnguardedTrialError" in end for end in ended)
    assert all(end.startswith("UnguardedTrialError: Rank 0 could not begin the trial") for end in ended[1:])
    assert together(unjudgeable, False) == 2 * [["COMPLETE"]]


def unjudgeable(rank: int, strict: bool) -> list[str]:
    guard = make_guard(gpu=TOY_CPU, strict=strict)

    def objective(single: optuna.Trial | None) -> float:
        trial = integration.TorchDistributedTrial(single)
        width = trial.suggest_int("width", SMALL, LARGE)
        with guard.trial(trial, nn.Linear(64, width), (32, 63), loss=torch.mean):  # its input has 64 features
            return train_together(width)

    with pytest.warns(UnguardedTrialWarning) if rank == 0 and not strict else nullcontext():
        return play(rank, objective, SMALL)


def dies_on_rank_1(rank: int, step: int) -> None:
    if rank == 1 and step == 1:
        os._exit(7)


def out_of_memory_on_rank_1(rank: int, step: int) -> None:
    if rank == 1 and step == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")


def out_of_memory(rank: int, step: int) -> None:
    if step == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_no_rank_hangs_when_another_dies(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    ended = ends_of(4, inline, log, dies_on_rank_1, SMALL, SMALL)
    assert ended[1] == 7
    assert all(isinstance(end, str) for rank, end in enumerate(ended) if rank != 1)  # an error of gloo
    (record,) = MeasurementStore(log).records()
    assert record.status == "failed"


def fails_on_rank_0_because_of_rank_1(rank: int, step: int) -> None:
    """As where ranks tell each other how they are, without a collective."""
    if step == 1 and rank == 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
    if step == 1:
        store: Any = dist.distributed_c10d._get_default_store()
        store.wait([f"perfguard/inline/{next(ranks._numbers['told'])}/ended/1"])
        raise ValueError("rank 1 has failed")


def test_out_of_memory_prunes_on_all_ranks_or_on_none(together: Together, tmp_path: Path) -> None:
    """Pruned alone, rank 1 would begin the next trial, while rank 0 waits for its gradients."""
    log = str(tmp_path / "all.db")
    assert together(inline, log, out_of_memory, SMALL, SMALL) == 2 * [["PRUNED", "PRUNED"]]
    assert ends_of(2, inline, log, fails_on_rank_0_because_of_rank_1, SMALL, SMALL) == 2 * [["PRUNED", "PRUNED"]]
    assert {record.status for record in MeasurementStore(log).records()} == {"oom"}


def warned(rank: int, main: Callable[..., list[str]], *args: Any) -> list[str]:
    """Play, and return how it ends and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnguardedTrialWarning)
        try:
            ended = main(rank, *args)
        except Exception as error:
            ended = [type(error).__name__]
    return [*ended, *(str(one.message) for one in caught if one.category is UnguardedTrialWarning)]


@pytest.mark.parametrize("number", [2, 4])
def test_no_rank_hangs_when_another_runs_out_of_memory_and_each_says_why(number: int, tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    ended = ends_of(number, warned, inline, log, out_of_memory_on_rank_1, SMALL, SMALL)
    assert ended[1][0] == "OutOfMemoryError"
    assert ended[0][0] != "COMPLETE"
    others = " 0" if number == 2 else "s 0, 2, 3"
    assert f"Rank 1 ran out of memory in a trial, and rank{others} had not ended it 3 s later" in ended[1][1]
    assert ended[0][1:] == ended[1][1:]
    (record,) = MeasurementStore(log).records()
    assert record.status == "oom"


def out_of_step(rank: int, step: int) -> None:
    if step == 1 and rank == 1:
        dist.all_reduce(torch.ones(1), async_op=True)
    out_of_memory(rank, step)


def test_ranks_that_ran_out_of_memory_between_different_collectives_do_not_go_on(tmp_path: Path) -> None:
    """The next collective of rank 0 would meet the last one of rank 1."""
    ended = ends_of(2, warned, inline, str(tmp_path / "log.db"), out_of_step, SMALL, SMALL)
    assert [end[0] for end in ended] == 2 * ["OutOfMemoryError"]
    assert all("the ranks have begun different numbers of collectives" in end[1] for end in ended)


def repairing(rank: int, tries: int, log: str) -> list[str]:
    """The first ``tries`` run out of memory on all ranks."""
    micro_batches = []

    def objective(single: optuna.Trial | None) -> float:
        trial = integration.TorchDistributedTrial(single)
        width, repair = trial.suggest_int("width", SMALL, LARGE), repair_of(trial)
        micro_batches.append(str(repair.micro_batch_size))
        after_step = out_of_memory if len(micro_batches) <= tries else nothing
        return train_together(width, after_step=lambda step: after_step(rank, step))

    def wide(params: Any) -> Workload:
        return Workload(nn.Linear(64, params["width"]), inputs=(512, 64), loss=torch.mean)

    shown = guarded(objective, **settings(gpu=TOY_CPU, build=wide, on_oom="repair", log=log))
    return [*play(rank, shown, SMALL, SMALL), *micro_batches]


@pytest.mark.parametrize("number", [2, 4])
def test_trial_out_of_memory_runs_once_more_on_all_ranks(number: int, tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    assert ends_of(number, repairing, 1, log) == number * [["COMPLETE", "COMPLETE", "None", "256", "None"]]
    rows = [(row.number, row.status, row.in_words) for row in MeasurementStore(log).records()]
    assert sorted(rows) == [(0, "ok", "repaired"), (0, "oom", "launched"), (1, "ok", "launched")]
    assert ends_of(number, repairing, 2, log) == number * [["PRUNED", "COMPLETE", "None", "256", "None"]]


def by_decorator(rank: int, options: dict[str, Any], asks: bool, *widths: int) -> list[str]:
    def objective(single: optuna.Trial | None) -> float:
        trial = integration.TorchDistributedTrial(single)
        width = trial.suggest_int("width", SMALL, LARGE)
        if asks and trial.should_prune():
            raise optuna.TrialPruned
        value = train_together(width)
        trial.report(value, 1)
        return value

    return play(rank, guarded(objective, **settings(**{"gpu": TOY_CPU, "build": build} | options)), *widths)


@pytest.mark.parametrize("asks", [True, False])
def test_all_ranks_prune_together_with_guarded(asks: bool, together: Together, tmp_path: Path) -> None:
    """By should_prune() or by report(): both reach all ranks, and an error of a suggestion on rank 0 reaches none."""
    log = str(tmp_path / "log.db")
    ended = together(by_decorator, {"log": log}, asks, SMALL, LARGE, SMALL)
    assert ended == 2 * [["COMPLETE", "PRUNED", "COMPLETE"]]
    assert [record.status for record in MeasurementStore(log).records()].count("ok") == 2


def unjudgeable_build(params: Any) -> Any:
    raise ValueError("no such model")


def test_no_rank_hangs_when_the_verdict_raises_with_guarded() -> None:
    ended = ends_of(2, by_decorator, {"build": unjudgeable_build, "strict": True}, True, SMALL, SMALL)
    assert ended[0].startswith("UnguardedTrialError")
    assert isinstance(ended[1], str)  # rank 0 has ended


def unheeding(rank: int, strict: bool) -> list[str]:
    def objective(single: optuna.Trial | None) -> float:
        return train_together(integration.TorchDistributedTrial(single).suggest_int("width", SMALL, LARGE))

    shown = guarded(objective, **settings(gpu=TOY_CPU, build=build, strict=strict))
    if rank or strict:
        return play(rank, shown, LARGE)
    with pytest.warns(UnguardedTrialWarning, match="ran it against its verdict"):
        return play(rank, shown, LARGE)


def test_trial_that_ran_against_its_verdict_is_reported(together: Together) -> None:
    assert together(unheeding, False) == 2 * [["COMPLETE"]]
    assert "against its verdict" in ends_of(2, unheeding, True)[0]


def by_pruner(rank: int, options: dict[str, Any], *widths: int) -> list[str]:
    def objective(single: optuna.Trial | None) -> float:
        trial = integration.TorchDistributedTrial(single)
        width = trial.suggest_int("width", SMALL, LARGE)
        if trial.should_prune():
            raise optuna.TrialPruned
        return train_together(width)

    return play(rank, objective, *widths, pruner=make_pruner(gpu=TOY_CPU, **options) if rank == 0 else None)


def test_all_ranks_prune_together_with_a_pruner(together: Together) -> None:
    assert together(by_pruner, {}, SMALL, LARGE, SMALL) == 2 * [["COMPLETE", "PRUNED", "COMPLETE"]]


def test_strict_pruner_prunes_what_it_cannot_judge(together: Together) -> None:
    """An error that rank 0 raises in should_prune() does not reach the other ranks, which wait for an answer."""
    options = {"build": unjudgeable_build, "strict": True}
    assert together(by_pruner, options, SMALL, SMALL) == 2 * [["PRUNED", "PRUNED"]]


def test_all_ranks_prune_together_by_a_dry_run() -> None:
    """Nothing of the objective begins before the verdict, on any rank."""
    ended = ends_of(2, by_dry_run, SMALL, LARGE, SMALL)
    assert ended == [["COMPLETE", "PRUNED", "COMPLETE", "2 began"], ["COMPLETE", "PRUNED", "COMPLETE", "2 began"]]


def by_dry_run(rank: int, *widths: int) -> list[str]:
    began = []

    def objective(single: optuna.Trial | None) -> float:
        began.append(single)
        return train_together(integration.TorchDistributedTrial(single).suggest_int("width", SMALL, LARGE))

    return [*play(rank, guarded(objective, **settings(gpu=TOY_CPU)), *widths), f"{len(began)} began"]


def test_guarded_study_shows_the_other_ranks_only_what_it_launches() -> None:
    assert ends_of(2, by_guarded_study) == [["COMPLETE", "PRUNED", "COMPLETE"], ["COMPLETE", "COMPLETE"]]


def by_guarded_study(rank: int) -> list[str]:
    def objective(single: optuna.Trial | None) -> float:
        return train_together(integration.TorchDistributedTrial(single).suggest_int("width", SMALL, LARGE))

    if rank:
        return play(rank, objective, SMALL, SMALL)
    study = study_of(SMALL, LARGE, SMALL)
    study.optimize(objective, n_trials=2, pruner=PerfGuardPruner(**settings(gpu=TOY_CPU)))
    return [trial.state.name for trial in study.trials]


def repaired(rank: int) -> list[str]:
    guard, found = make_guard(gpu=TOY_CPU, on_violation="repair"), []

    def objective(single: optuna.Trial | None) -> float:
        trial = integration.TorchDistributedTrial(single)
        width = trial.suggest_int("width", SMALL, LARGE)
        with pytest.raises(ConfigurationError, match=r"run\.repair"):
            repair_of(trial)
        with guard.trial(trial, nn.Linear(64, width), (2**14, 64), loss=torch.mean) as run:
            found.append(str(run.repair))
            return train_together(width)

    play(rank, objective, SMALL)
    return found


def test_repair_is_the_same_on_all_ranks(together: Together) -> None:
    (first,), (second,) = together(repaired)
    assert first == second
    assert "accumulation=1," not in first


def by_itself(rank: int) -> list[str]:
    study, guard = plain_study_of(SMALL, LARGE), make_guard(gpu=TOY_CPU)

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", SMALL, LARGE)
        with guard.trial(trial, nn.Linear(64, width), (32, 64), loss=torch.mean):
            return train(width)

    study.optimize(objective, n_trials=2)
    return [trial.state.name for trial in study.trials]


def test_rank_with_a_study_of_its_own_waits_for_no_other() -> None:
    assert ends_of(2, by_itself) == 2 * [["COMPLETE", "PRUNED"]]


def test_none_is_no_trial_outside_a_process_group() -> None:
    with pytest.raises(ConfigurationError, match="There is no trial"):
        make_guard().trial(None, nn.Linear(64, 8), (32, 64))


# --- Launchers of others --------------------------------------------------------------------------------------------------------


class Wide(nn.Linear):
    """As the Trainer calls it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return {"loss": super().forward(x).mean()}


def by_accelerate(width: int) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, loader = nn.Linear(64, width), DataLoader(TensorDataset(torch.ones(64, 64)), 8)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(x).mean())
        optimizer.step()


def by_trainer(width: int) -> None:
    transformers = pytest.importorskip("transformers")
    rows: Any = [{"x": torch.ones(64), "labels": torch.ones(1)}] * 64
    options = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "num_train_epochs": 1}
    transformers.Trainer(Wide(64, width), transformers.TrainingArguments(**options), train_dataset=rows).train()


def by_lightning(width: int) -> None:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, width)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, strategy="ddp", devices=dist.get_world_size(), accelerator="cpu", **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(64, 64)), 8))


def makes_no_step(width: int) -> None:
    pytest.importorskip("accelerate").Accelerator(cpu=True).wait_for_everyone()


def launched(rank: int, train: Callable[[int], None], options: dict[str, Any], *widths: int) -> list[str]:
    size, here = str(dist.get_world_size()), str(rank)
    os.environ.update(WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, RANK=here, LOCAL_RANK=here, GROUP_RANK="0", TORCHELASTIC_RUN_ID="1")

    def objective(single: optuna.Trial | None) -> float:
        train(integration.TorchDistributedTrial(single).suggest_int("width", SMALL, LARGE))
        return 0.0

    return play(rank, guarded(objective, **settings(gpu=TOY_CPU, **options)), *widths)


@pytest.mark.parametrize(("train", "number"), [(by_accelerate, 4), (by_trainer, 2), (by_lightning, 2)])
def test_all_ranks_prune_together_under_launchers_of_others(train: Callable[[int], None], number: int, tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    ended = ends_of(number, launched, train, {"log": log}, SMALL, LARGE, SMALL)
    assert ended == number * [["COMPLETE", "PRUNED", "COMPLETE"]]
    records = MeasurementStore(log).records()
    assert sorted(record.verdict.action for record in records if record.verdict) == ["launch", "launch", "prune"]
    assert [record.status for record in records].count("ok") == 2


def test_no_rank_hangs_under_a_launcher_when_the_verdict_raises() -> None:
    ended = ends_of(2, launched, makes_no_step, {"strict": True}, SMALL)
    assert ended[0].startswith("UnguardedTrialError")
    assert ended[1].startswith("UnguardedTrialError: Rank 0 could not begin the trial")
    assert ends_of(2, launched, makes_no_step, {}, SMALL) == 2 * [["COMPLETE"]]


def test_process_group_must_be_there_before_the_first_trial() -> None:
    with pytest.raises(ConfigurationError, match=r"Make the process group before the first trial, by init_process_group"):
        guarded(lambda _: 0.0, **settings(gpu=TOY_CPU))(None)
