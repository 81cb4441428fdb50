"""A dry run of one rank of many holds what PyTorch's tracker and real processes hold."""

from __future__ import annotations

import functools
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
    fully_shard,
)
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture.ranks import torchrun_variables
from perfguard.capture.trial import capture
from perfguard.cli import main
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError
from perfguard.graph import StorageKind
from perfguard.unmodelled import HOST_OPTIMIZER, NCCL_BUFFERS, NO_PROCESS_GROUP
from tests.perfguard.capture import toy_offloaded
from tests.perfguard.capture.toy_allocated import allocated_bytes
from tests.perfguard.capture.toy_ranks import (
    WAYS,
    bytes_of,
    dry_run,
    in_a_child,
    language_model,
    real_bytes,
    sharded,
    sharded_by_fsdp1,
    tracked_bytes,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),  # this build has no NCCL, and PyTorch says so
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch.distributed.optim, as it is imported
]
A100 = resolve_device("a100")
UNTRACKED = ("FSDP1", "FSDP1, bf16", "tensor parallelism")  # PyTorch's tracker does not know them
COLLECTIVES = {"allreduce_", "_allgather_base_", "_reduce_scatter_base_", "broadcast_"}
PARAMETER_BYTES = 4 * sum(parameter.numel() for parameter in language_model().parameters())


@pytest.fixture(autouse=True)
def _little_to_collect() -> None:
    """As in conftest.py, but for each test: the first of them imports much of PyTorch."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def group_of_before() -> Iterator[None]:
    """A process group that the process of the study has made."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.init_process_group("fake", rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def objective(make: Callable[[], nn.Module], world_size: int = 4, rank: int = 0) -> Callable[[], None]:
    def run() -> None:
        dist.init_process_group("nccl", rank=rank, world_size=world_size)
        train(make(), "cuda")

    return run


# --- Memory ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_peak_of_a_rank_is_that_of_pytorchs_tracker(way: str, world_size: int) -> None:
    assert dry_run(way, world_size).graph.peak_live_bytes == pytest.approx(tracked_bytes(way, world_size), rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("way", sorted(set(WAYS) - {"DDP", "FSDP2", *UNTRACKED}))
def test_peak_in_other_ways_is_that_of_pytorchs_tracker(way: str, world_size: int) -> None:
    assert dry_run(way, world_size).graph.peak_live_bytes == pytest.approx(tracked_bytes(way, world_size), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("way", UNTRACKED)
def test_peak_in_ways_without_a_tracker_is_that_of_the_allocator(way: str) -> None:
    captured = dry_run(way, 4, gpu="a100")
    assert captured.graph.peak_live_bytes == pytest.approx(allocated_bytes(way, 4), rel=0.001)
    assert ("tp" if way == "tensor parallelism" else "fsdp") in captured.graph.options
    assert {op.attributes["ranks"] for op in captured.graph.ops if "ranks" in op.attributes} == {(4, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_two_real_processes_hold_the_same(way: str, tmp_path: Path) -> None:
    graph, few = dry_run(way, 2).graph, 8192  # a batch, a seed, counters of steps
    gathered = max((op.bytes_written for op in graph.ops if op.name == "_allgather_base_"), default=0)
    at_gather = max((graph.live_bytes[at + 1] for at, op in enumerate(graph.ops) if op.bytes_written == gathered), default=0)
    peak, left = real_bytes(way, tmp_path)
    assert abs(left - graph.live_bytes[-1]) < few
    assert -few < peak - max(graph.peak_live_bytes, at_gather + gathered) < 2 * gathered + few


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "world_size"), [("fp32", 4), ("bf16", 7)])
def test_offloaded_shards_are_where_pytorchs_tracker_finds_them(
    precision: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfguard.capture.host.peak_resident_bytes", lambda: 0)

    def run() -> None:
        dist.init_process_group("nccl", rank=0, world_size=world_size)
        toy_offloaded.train(toy_offloaded.perceptron(init_device_mesh("cuda", (world_size,)), precision), "cuda")

    captured, (device, host) = capture(run, A100), toy_offloaded.tracked_bytes(precision, world_size)
    assert captured.graph.peak_live_bytes == device
    assert captured.host_memory is not None
    assert host - 100 <= captured.host_memory.process_bytes <= host  # counters of steps are no part of it


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pins", [False, True])
def test_offloaded_shards_gradients_and_states_are_on_the_host(pins: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfguard.capture.host.peak_resident_bytes", lambda: 0)
    shard, pinned = 4 * 1000 * 250, 2**20  # whose pages PyTorch rounds up to a power of two

    def run() -> None:
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=4)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1000, 1000, bias=False))
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=pins))
        if not pins:
            model.to_empty(device="cpu")
            nn.init.normal_(next(model.parameters()))
        assert next(model.parameters()).device.type == "cpu"
        optimizer = torch.optim.Adam(model.parameters(), fused=fused)
        for (x,) in DataLoader(TensorDataset(torch.zeros(16, 1000)), 4):
            optimizer.zero_grad()
            model(x.cuda()).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    captured = capture(run, A100)
    assert captured.steps == 4
    assert not captured.phases  # DTensor looks at whole parameters once, of which no storage is there
    assert bytes_of(captured, StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE) == 0
    assert HOST_OPTIMIZER in captured.graph.unmodelled
    assert captured.host_memory is not None
    passing = 0 if fused else 2 * shard  # roots of the second moments, and the same divided
    lasting = 2 * (pinned if pins else shard) + 2 * shard
    assert captured.host_memory.process_bytes == pytest.approx(lasting + passing, abs=100)


@pytest.mark.parametrize("offloads", [True, False])
def test_whole_weights_that_shards_are_gathered_into_are_a_phase(offloads: bool) -> None:
    def run() -> None:
        dist.init_process_group("nccl", rank=0, world_size=4)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False, device="cuda") for _ in range(8)))
        for part in (*model, model):
            fully_shard(part)
        optimizer = torch.optim.SGD(model.parameters())
        for (x,) in DataLoader(TensorDataset(torch.zeros(16, 256)), 4):
            optimizer.zero_grad()
            model(x.cuda()).sum().backward()
            optimizer.step()
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offloads))

    checkpoints = [phase for name, phase in capture(run, A100).phases.items() if "checkpoint" in name]
    assert bool(checkpoints) != offloads
    assert all(phase.peak_live_bytes > 8 * 4 * 256 * 256 for phase in checkpoints)


def test_shards_become_smaller_with_more_ranks_and_the_gathered_block_does_not() -> None:
    two, eight = dry_run("FSDP2", 2, "a100"), dry_run("FSDP2", 8, "a100")
    lasting = StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE
    assert bytes_of(two, StorageKind.PARAMETER) == pytest.approx(PARAMETER_BYTES / 2, rel=0.01)
    assert bytes_of(two, *lasting) == pytest.approx(4 * bytes_of(eight, *lasting), rel=0.01)
    assert max(op.bytes_written for op in two.graph.ops if op.name == "_allgather_base_") == max(
        op.bytes_written for op in eight.graph.ops if op.name == "_allgather_base_"
    )


def test_ddp_keeps_buckets_of_the_size_of_the_gradients_unless_gradients_are_views_of_them() -> None:
    copied, views = dry_run("DDP", 2, "a100"), dry_run("DDP, gradients as views", 2, "a100")
    assert bytes_of(copied, StorageKind.GRADIENT) == 2 * PARAMETER_BYTES
    assert bytes_of(views, StorageKind.GRADIENT) == PARAMETER_BYTES
    assert copied.graph.peak_live_bytes - views.graph.peak_live_bytes >= PARAMETER_BYTES / 2


def test_parameters_stay_whole_between_passes_unless_they_are_resharded() -> None:
    resharded, kept = (dry_run(way, 8, "a100").graph for way in ("FSDP2", "FSDP2, not resharded"))
    names = [Counter(op.name for op in graph.ops) for graph in (resharded, kept)]
    assert names[0]["_allgather_base_"] - names[1]["_allgather_base_"] == 4  # each block once more, in the backward pass
    assert kept.peak_live_bytes > resharded.peak_live_bytes


@pytest.mark.parametrize("world_size", [4, 7])
def test_shards_are_there_once_after_a_model_is_materialized_or_cast(world_size: int) -> None:
    def materialized() -> nn.Module:
        with torch.device("meta"):
            model = sharded(language_model(), "cuda")
        return model.to_empty(device="cuda")

    def graph(make: Callable[[], nn.Module]) -> Any:
        return capture(objective(make, world_size), A100).graph

    made = graph(lambda: sharded(language_model().cuda(), "cuda"))
    assert graph(materialized).peak_live_bytes == made.peak_live_bytes
    cast_before = graph(lambda: sharded(language_model().cuda().bfloat16(), "cuda"))
    assert graph(lambda: sharded(language_model().cuda(), "cuda").bfloat16()).peak_live_bytes == cast_before.peak_live_bytes


# --- Collectives and words ------------------------------------------------------------------------------------------------------


def test_collectives_are_operators_that_write_their_buffers() -> None:
    graph = dry_run("DDP", 2, "a100").graph
    reduces = [op for op in graph.ops if op.name == "allreduce_"]
    assert sum(op.bytes_written for op in reduces) == PARAMETER_BYTES
    assert {op.kind for op in reduces} == {"copy"}
    assert graph.options == ("batch-on-device", "ddp")
    assert graph.unmodelled[0] == NCCL_BUFFERS.of(0, 2)


def test_the_compiler_finds_the_overloads_of_what_is_replaced() -> None:
    def compiled() -> nn.Module:
        assert torch.ops.fsdp.all_gather_copy_in.op_overloads()
        return language_model().cuda()

    capture(objective(compiled), A100)


def test_without_a_process_group_nothing_is_said() -> None:
    graph = capture(lambda: train(language_model().cuda(), "cuda"), A100).graph
    assert (graph.options, graph.unmodelled) == (("batch-on-device",), ())
    assert not COLLECTIVES & {op.name for op in graph.ops}


def test_the_environment_of_torchrun_says_rank_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    seen: list[Any] = []

    def run() -> None:
        dist.init_process_group("nccl")
        seen.append((dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()))
        train(WAYS["FSDP2"]("cuda"), "cuda")

    assert capture(run, A100).graph.unmodelled[0] == NCCL_BUFFERS.of(3, 8)
    assert seen == [(3, 8, 8)]
    assert not dist.is_initialized()


def test_mesh_of_two_dimensions_shards_over_one_and_reduces_over_the_other() -> None:
    def hybrid() -> nn.Module:
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = language_model().cuda()
        for block in [*model]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    captured = capture(objective(hybrid, 8), A100)
    assert bytes_of(captured, StorageKind.PARAMETER) == pytest.approx(PARAMETER_BYTES / 4, rel=0.01)
    names = Counter(op.name for op in captured.graph.ops)
    assert names["allreduce_"] == names["_reduce_scatter_base_"] == 6


def trained_by_accelerate() -> None:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator, model = Accelerator(), language_model()
    loader = DataLoader(TensorDataset(torch.randint(0, 1000, (640, 64))), 4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for (tokens,) in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
        optimizer.step()
        accelerator.gather(loss)


def trained_by_lightning() -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = language_model()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[0].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, devices=8, strategy="ddp", accelerator="gpu", **quiet)  # type: ignore[arg-type]
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randint(0, 1000, (640, 64))), 4))


@pytest.mark.slow
@pytest.mark.parametrize("trained", [trained_by_accelerate, trained_by_lightning])
def test_trainers_take_the_variables_of_torchrun(trained: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in torchrun_variables(8).items():
        monkeypatch.setenv(name, value)
    captured = in_a_child(trained)
    assert "ddp" in captured.graph.options
    assert captured.steps_per_epoch == 20  # 640 samples in batches of 4 on 8 ranks
    assert sum(op.bytes_written for op in captured.graph.ops if op.name == "allreduce_") == PARAMETER_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("offloads", [False, True])
def test_accelerate_shards_what_its_optimizer_holds(offloads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # It finds the parameters of the optimizer again by their addresses, and those of meta are all 0.
    accelerate = pytest.importorskip("accelerate")
    for name, value in torchrun_variables(8).items():
        monkeypatch.setenv(name, value)

    def trained() -> None:
        options = {"fsdp_version": 2, "cpu_ram_efficient_loading": False, "cpu_offload": offloads}
        plugin = accelerate.FullyShardedDataParallelPlugin(**options)
        accelerator, model = accelerate.Accelerator(fsdp_plugin=plugin), language_model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        train(model, "cuda", make_optimizer=lambda _: optimizer)

    captured = in_a_child(trained)
    shards = bytes_of(captured, StorageKind.PARAMETER)
    assert captured.num_ranks == 8
    assert (HOST_OPTIMIZER in captured.graph.unmodelled) == offloads
    if offloads:
        assert bytes_of(captured, StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE) == 0
        return
    assert PARAMETER_BYTES / 8 <= shards < 1.02 * PARAMETER_BYTES / 8
    assert bytes_of(captured, StorageKind.GRADIENT) == shards
    assert 2 * shards <= bytes_of(captured, StorageKind.OPTIMIZER_STATE) < 2 * shards + 1000  # and step counters


def test_spawned_function_is_dry_run_as_the_first_process() -> None:
    def worker(rank: int, world_size: int) -> None:
        dist.init_process_group("nccl", rank=rank, world_size=world_size)
        train(WAYS["DDP"]("cuda"), "cuda")

    graph = capture(lambda: torch.multiprocessing.spawn(worker, (2,), nprocs=2), A100).graph  # type: ignore[no-untyped-call, attr-defined]
    assert graph.content_hash == dry_run("DDP", 2, "a100").graph.content_hash


def test_a_group_of_before_is_replaced(group_of_before: None) -> None:
    captured = in_a_child(lambda: train(WAYS["DDP"]("cuda"), "cuda"))
    assert str(captured.graph.unmodelled[0]).startswith("rank 1 of 2")


def test_what_is_not_wrapped_or_wrapped_as_one_is_said() -> None:
    def said_of(make: Callable[[], nn.Module]) -> str:
        return "; ".join(map(str, capture(objective(make), A100).graph.unmodelled))

    def as_one() -> nn.Module:
        model = language_model().cuda()
        fully_shard(model)
        return model

    assert "no model is wrapped or sharded: each process holds all of it" in said_of(lambda: language_model().cuda())
    assert "FSDP wraps the model as one part" in said_of(as_one)


# --- Bad input ------------------------------------------------------------------------------------------------------------------


def test_rank_out_of_range_is_an_error() -> None:
    with pytest.raises(CaptureError, match="Of 4 processes, the rank must be 0 to 3, but got 7"):
        capture(objective(language_model, rank=7), A100)


def test_size_that_nobody_states_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(CaptureError, match="State their number: perfguard dry-run --world-size 8"):
        capture(lambda: dist.init_process_group("nccl"), A100)


def test_mesh_that_does_not_divide_the_world_is_an_error() -> None:
    def run() -> None:
        dist.init_process_group("nccl", rank=0, world_size=8)
        init_device_mesh("cuda", (3, 3))

    with pytest.raises(Exception, match="Mesh should not be bigger than default world size"):
        capture(run, A100)


def test_size_that_does_not_divide_the_rows_is_padded_as_fsdp_does() -> None:
    assert dry_run("FSDP2", 7).graph.peak_live_bytes == pytest.approx(tracked_bytes("FSDP2", 7), rel=0.001)


def test_model_that_is_sharded_already_is_an_error(group_of_before: None) -> None:
    model = sharded(language_model(), "cpu")
    with pytest.raises(CaptureError, match="sharded before the trial cannot be dry-run"):
        in_a_child(lambda: train(model, "cpu"), "cpu")


@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning")
def test_whole_weights_of_fsdp1_are_gathered_for_a_checkpoint() -> None:
    def run(*, saves: bool) -> None:
        dist.init_process_group("nccl", rank=0, world_size=4)
        model = sharded_by_fsdp1(language_model(), "cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for (tokens,) in DataLoader(TensorDataset(torch.randint(0, 1000, (12, 64))), batch_size=4):
            model(tokens.cuda()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            settings = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            if saves:
                with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
                    assert len(model.state_dict()) == len(language_model().state_dict())

    saved, plain = (capture(functools.partial(run, saves=saves), A100) for saves in (True, False))
    assert saved.unseen == plain.unseen == ""
    assert bytes_of(saved, StorageKind.PARAMETER) == bytes_of(plain, StorageKind.PARAMETER) > 0


def test_offload_of_fsdp1_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match="FSDP1's offload to the host cannot be dry-run"):
        capture(objective(lambda: sharded_by_fsdp1(language_model(), "cuda", cpu_offload=CPUOffload(offload_params=True))), A100)


# --- The command ----------------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
assert torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"])
torch.cuda.set_device(rank)
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).to(f"cuda:{rank}"))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_world_size_is_stated_for_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    peaks = []
    for words in (["--world-size", "8"], ["--world-size", "2"]):
        assert main(["dry-run", str(tmp_path / "train.py"), "--gpu", "a100-pcie-40gb", "--json", "--steps", "4", *words]) == 0
        document = json.loads(capsys.readouterr().out)
        assert f"rank 0 of {words[1]}: NCCL's buffers beyond those of an all-reduce are not counted" in document["unmodelled"][0]
        peaks.append(document["peak_memory_bytes"]["median"])
    assert peaks[0] < peaks[1]
    for name, value in {"WORLD_SIZE": "16", "RANK": "15", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert main(["dry-run", str(tmp_path / "train.py"), "--gpu", "a100-pcie-40gb", "--json", "--steps", "4"]) == 0
    assert "rank 15 of 16" in json.loads(capsys.readouterr().out)["unmodelled"][0]
    monkeypatch.undo()
    assert main(["dry-run", str(tmp_path / "train.py"), "--gpu", "a100-pcie-40gb"]) == 1
    assert "State their number: perfguard dry-run --world-size 8 train.py" in capsys.readouterr().err


def test_world_size_is_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models.py").write_text("")
    assert main(["predict", f"{tmp_path}/models.py:build", "--world-size", "8"]) == 2
    assert "--world-size is for a script" in capsys.readouterr().err


def test_world_size_without_a_process_group_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    graph = capture(lambda: train(language_model().cuda(), "cuda"), A100).graph
    assert graph.unmodelled == (NO_PROCESS_GROUP.of(8),)


def test_synchronized_batch_norm_sends_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks its input whether it is on a GPU."""
    for name, value in torchrun_variables(2).items():
        monkeypatch.setenv(name, value)

    def objective() -> None:
        dist.init_process_group("nccl")
        model: Any = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 10))
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
        model = nn.parallel.DistributedDataParallel(model, device_ids=[dist.get_rank()])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            model(torch.randn(4, 3, 8, 8, device=dist.get_rank())).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    graph = capture(objective, A100).graph
    names = [op.name for op in graph.ops]
    assert names.count("batch_norm_elemt") == names.count("batch_norm_backward_elemt") == 1
    assert any(one.num_bytes == 2 * (2 * 16 + 1) * 4 for one in graph.storages)  # mean, deviation and count of both ranks
