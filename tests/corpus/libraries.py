"""Programs that train with the libraries and trainers that people use around PyTorch."""
# mypy: disable-error-code="import-untyped, attr-defined, no-untyped-call, call-arg"
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.corpus.data import images, rows


class _Scenes(Dataset[Any]):
    """Images of several sizes with one to four boxes each."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        height, width = 48 + 16 * (index % 2), 64
        corners = torch.rand(1 + index % 4, 2) * 20
        boxes = torch.cat([corners, corners + 8 + torch.rand(len(corners), 2) * 16], 1)
        return torch.rand(3, height, width), {"boxes": boxes, "labels": torch.arange(len(boxes)) % 3}


def _in_lists(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


def _padded(samples: list[Any]) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Images at the top left of a batch that is as large as the largest of them."""
    pictures, targets = _in_lists(samples)
    shape = [max(sizes) for sizes in zip(*(picture.shape for picture in pictures), strict=True)]
    batch = pictures[0].new_zeros((len(pictures), *shape))
    for picture, into in zip(pictures, batch, strict=True):
        into[:, : picture.shape[1], : picture.shape[2]].copy_(picture)
    return batch, list(targets)


class _Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 32, 3, 2, 1), nn.ReLU())
        self.kinds, self.places = nn.Conv2d(32, 3, 1), nn.Conv2d(32, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return self.kinds(features).flatten(2).transpose(1, 2), self.places(features).flatten(2).transpose(1, 2)


def anchors_and_boxes() -> None:
    """A detector that pads its images on the host, gives each anchor the box that it meets most, and drops boxes in a test."""
    from torchvision.ops import box_iou

    model = _Detector().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    y, x = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    centres = torch.stack([x, y], 2).reshape(-1, 2) * 4.0 + 2
    anchors = torch.cat([centres - 8, centres + 8], 1).cuda()
    for _epoch in range(2):
        model.train()
        for batch, targets in DataLoader(_Scenes(64), 8, collate_fn=_padded):
            kinds, places = model(batch.cuda())
            losses: dict[str, Any] = {"kind": [], "place": []}
            for kind, place, target in zip(kinds, places, targets, strict=True):
                boxes, labels = target["boxes"].cuda(), target["labels"].cuda()
                overlap, best = box_iou(boxes, anchors[: len(kind)]).max(0)
                is_object = overlap > 0.3
                wanted = F.one_hot(labels[best], 3).float() * is_object[:, None]
                losses["kind"].append(F.binary_cross_entropy_with_logits(kind, wanted))
                away = (place - boxes[best] / 64).abs().sum(1)
                losses["place"].append((away * is_object).sum() / is_object.sum().clamp(min=1))
            loss = sum(torch.stack(parts).mean() for parts in losses.values())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for batch, _ in DataLoader(_Scenes(16), 8, collate_fn=_padded):
                kinds, places = model(batch.cuda())
                for kind, place in zip(kinds, places, strict=True):
                    score, best = kind.sigmoid().max(1).values.topk(20)
                    boxes = torch.cat([place[best, :2], place[best, :2] + place[best, 2:].abs()], 1)
                    meets, kept = (box_iou(boxes, boxes) > 0.5).cpu(), [0]
                    for at in range(1, len(score)):
                        if not meets[at, kept].any():
                            kept.append(at)
                    boxes[kept].tolist()


class _Masks(Dataset[Any]):
    """Images of several sizes with a class for each pixel. They are scaled, padded and cropped as they are read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        height, width = 40 + index % 24, 60
        image, mask = torch.rand(3, height, width), torch.randint(0, 4, (height, width))
        missing = max(0, 48 - height)
        image, mask = F.pad(image, (0, 0, 0, missing)), F.pad(mask, (0, 0, 0, missing), value=255)
        top, left = int(torch.randint(0, image.shape[1] - 47, ())), int(torch.randint(0, 13, ()))
        return image[:, top : top + 48, left : left + 48], mask[top : top + 48, left : left + 48]


def segmentation_with_an_auxiliary_loss() -> None:
    """torchvision's recipe: crops with padding, a loss for each output, a rate that falls by batch, a confusion matrix."""
    from torchvision.models.segmentation import fcn_resnet50

    torch.manual_seed(0)
    model = fcn_resnet50(weights=None, weights_backbone=None, num_classes=4, aux_loss=True).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(_Masks(), 8, shuffle=True, drop_last=True)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=len(loader), power=0.9)
    for image, mask in loader:
        image, mask = image.cuda(), mask.cuda()
        losses = {name: F.cross_entropy(out, mask, ignore_index=255) for name, out in model(image).items()}
        loss = losses["out"] + 0.5 * losses["aux"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    matrix = torch.zeros(16, dtype=torch.long, device="cuda")
    with torch.inference_mode():
        for image, mask in DataLoader(_Masks(), 8):
            wrong = model(image.cuda())["out"].argmax(1).flatten()
            right = mask.cuda().flatten()
            is_known = right < 4
            matrix += torch.bincount(4 * right[is_known] + wrong[is_known], minlength=16)


def graphs_in_batches() -> None:
    """Small graphs by torch_geometric, whose numbers of nodes are equal, with a readout for each."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as Graphs
    from torch_geometric.nn import GCNConv, global_mean_pool

    def graph(label: int) -> Data:
        return Data(x=torch.randn(12, 8), edge_index=torch.randint(0, 12, (2, 40)), y=torch.tensor([label]))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = GCNConv(8, 32), GCNConv(32, 32), nn.Linear(32, 3)

        def forward(self, data: Any) -> torch.Tensor:
            hidden = self.first(data.x, data.edge_index).relu()
            hidden = self.second(hidden, data.edge_index).relu()
            out: torch.Tensor = self.head(global_mean_pool(hidden, data.batch))
            return out

    data = [graph(at % 3) for at in range(96)]
    model = Net().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _epoch in range(2):
        for batch in Graphs(data, batch_size=16, shuffle=True):
            batch = batch.to("cuda")
            loss = F.cross_entropy(model(batch), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [(index + at) % 90 + 1 for at in range(16)], "attention_mask": [1] * 16, "labels": index % 2}


def fine_tuned_by_a_trainer() -> None:
    """transformers' Trainer: two batches a step, an evaluation after each epoch, and a callback that may stop it."""
    from transformers import BertConfig, BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        attn_implementation="eager", max_position_embeddings=32,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=3, eval_strategy="epoch",
            save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="loss", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        Trainer(
            model=BertForSequenceClassification(config), args=arguments, train_dataset=_Sentences(), eval_dataset=_Sentences(),
            callbacks=[EarlyStoppingCallback(2)],
        ).train()  # fmt: skip


def accelerated_accumulation() -> None:
    """accelerate: four batches a step in its own context, clipped where gradients are complete, metrics gathered."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=4)
    model: Any = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, rows(320, 16))
    for _epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.gather(loss.detach()).mean().item()


def lightning_module() -> None:
    """Lightning: accumulation over two batches, clipping, a validation, and a callback that stops early."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=1.0, accelerator="gpu", devices=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            callbacks=[lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=2)],
        )  # fmt: skip
        trainer.fit(Module(), rows(160, 16), rows(64, 16))


def timm_with_an_average() -> None:
    """timm's parts: mixed images, soft labels, an average of the model, its optimizer and its schedule by epoch."""
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV2

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    ).cuda()  # fmt: skip
    average = ModelEmaV2(model, decay=0.999)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1)
    mixup = Mixup(mixup_alpha=0.8, num_classes=10, label_smoothing=0.1)
    loss_of = SoftTargetCrossEntropy()
    for epoch in range(3):
        for x, y in images(128, 16):
            x, y = mixup(x.cuda(), y.cuda())
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update(model)
        scheduler.step(epoch + 1)


def progress_and_metrics() -> None:
    """A bar that shows the loss, metrics of torchmetrics on the device, and a writer of summaries."""
    from torch.utils.tensorboard import SummaryWriter
    from torchmetrics.classification import MulticlassAccuracy
    from tqdm import tqdm

    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    accuracy = MulticlassAccuracy(4).cuda()
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        for epoch in range(3):
            for x, y in (bar := tqdm(rows(160, 16), desc=f"epoch {epoch}", disable=True)):
                x, y = x.cuda(), y.cuda()
                logits = model(x)
                loss = F.cross_entropy(logits, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                accuracy.update(logits, y)
                bar.set_postfix(loss=loss.item())
            writer.add_scalar("accuracy", accuracy.compute().item(), epoch)
            accuracy.reset()


def adapters_of_a_library() -> None:
    """A language model of transformers with adapters of peft, in a loop of the program's own with a schedule by step."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

    base = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, attn_implementation="eager"))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.0)).to("cuda")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    loader = DataLoader(TensorDataset(torch.randint(0, 100, (128, 24))), 16, shuffle=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 2 * len(loader))
    model.train()
    for _epoch in range(2):
        for (text,) in loader:
            text = text.to("cuda")
            loss = model(input_ids=text, labels=text).loss
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


PROGRAMS: dict[Callable[[], object], int | None] = {
    anchors_and_boxes: 16,
    segmentation_with_an_auxiliary_loss: 8,
    graphs_in_batches: 12,
    fine_tuned_by_a_trainer: None,
    accelerated_accumulation: 10,
    lightning_module: None,
    timm_with_an_average: 24,
    progress_and_metrics: 30,
    adapters_of_a_library: 16,
}
"""The programs, with the steps that each makes. None: what a validation says may end it."""
