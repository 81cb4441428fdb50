"""Programs for data of other kinds: sound, boxes, masks, graphs, points, pairs, games and series, as public code has them."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.corpus.data import Pairs, images, tokens


def _sounds(number: int, batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(number, 2048), torch.arange(number) % 10), batch)


def sound_classification() -> None:
    """Spectra on the device, a mask over time and frequency, convolutions."""
    window = torch.hann_window(256).cuda()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    model = nn.Sequential(model, nn.Linear(16, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(2):
        for x, y in _sounds(160, 16):
            spectrum = torch.stft(x.cuda(), 256, 128, window=window, return_complex=True).abs().square()
            spectrum = torch.log(spectrum + 1e-6)
            spectrum[:, 10:20] = 0
            loss = F.cross_entropy(model(spectrum[:, None]), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def speech_to_text() -> None:
    """Convolutions over frames, with a loss that aligns."""
    encoder = nn.Sequential(nn.Conv1d(20, 32, 5, padding=2), nn.GELU(), nn.Conv1d(32, 64, 5, padding=2), nn.GELU()).cuda()
    head = nn.Linear(64, 30).cuda()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()])
    data = TensorDataset(torch.randn(80, 50, 20), torch.randint(1, 30, (80, 12)))
    for _epoch in range(2):
        for frames, text in DataLoader(data, 8):
            hidden = encoder(frames.cuda().transpose(1, 2)).transpose(1, 2)
            log_probabilities = head(hidden).log_softmax(-1).transpose(0, 1)
            lengths = torch.full((len(frames),), 50), torch.full((len(frames),), 12)
            loss = F.ctc_loss(log_probabilities, text.cuda(), *lengths)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*encoder.parameters(), *head.parameters()], 5.0)
            optimizer.step()


def boxes_on_a_grid() -> None:
    """A detector of one stage: each cell says whether it has an object, where, and which."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU(), nn.Conv2d(32, 8, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    data = TensorDataset(torch.randn(80, 3, 32, 32), torch.rand(80, 4), torch.arange(80) % 3)
    for _epoch in range(2):
        for x, box, kind in DataLoader(data, 8):
            x, box, kind = x.cuda(), box.cuda(), kind.cuda()
            found = model(x).permute(0, 2, 3, 1)
            cell = (box[:, :2] * 8).long().clamp(max=7)
            at = torch.arange(len(x), device="cuda"), cell[:, 1], cell[:, 0]
            wanted = torch.zeros_like(found[..., 0])
            wanted[at] = 1.0
            objectness = F.binary_cross_entropy_with_logits(found[..., 0], wanted)
            place = F.smooth_l1_loss(found[at][:, 1:5], box)
            loss = objectness + 5 * place + F.cross_entropy(found[at][:, 5:], kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = F.relu(self.down(x))
        hidden = F.relu(self.middle(F.max_pool2d(skipped, 2)))
        out: torch.Tensor = self.out(torch.cat([skipped, self.up(hidden)], 1))
        return out


def masks_with_overlap() -> None:
    """A network with skips, a loss of overlap beside one of pixels, and a validation that counts."""
    model = _Unet().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(2):
        for x, _ in images(80, 8):
            x = x.cuda()
            mask = (x.mean(1, keepdim=True) > 0).float()
            logits = model(x)
            shares = logits.sigmoid()
            overlap = 1 - (2 * (shares * mask).sum((1, 2, 3)) + 1) / (shares.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
            loss = F.binary_cross_entropy_with_logits(logits, mask) + overlap.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, _ in images(16, 8):
                ((model(x.cuda()) > 0).float().mean()).item()
        model.train()


def neighbours_in_batches() -> None:
    """Small graphs in a batch, attention over their edges, a mean of each graph."""
    first, second = nn.Linear(8, 32).cuda(), nn.Linear(32, 4).cuda()
    score = nn.Linear(64, 1).cuda()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters(), *score.parameters()])
    for _epoch in range(2):
        for _batch in range(10):
            nodes, edges = torch.randn(16 * 10, 8).cuda(), torch.randint(0, 160, (2, 640)).cuda()
            graph = torch.arange(16).repeat_interleave(10).cuda()
            hidden = F.relu(first(nodes))
            weight = torch.exp(F.leaky_relu(score(torch.cat([hidden[edges[0]], hidden[edges[1]]], 1))))
            total = torch.zeros(160, 1, device="cuda").index_add(0, edges[1], weight)
            share = weight / total[edges[1]]
            hidden = torch.zeros_like(hidden).index_add(0, edges[1], share * hidden[edges[0]])
            pooled = torch.zeros(16, 32, device="cuda").index_add(0, graph, hidden) / 10
            loss = F.cross_entropy(second(pooled), torch.randint(0, 4, (16,)).cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def points_in_space() -> None:
    """Clouds of points: the same network for each, and the largest over all."""
    each = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1)).cuda()
    head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5)).cuda()
    optimizer = torch.optim.Adam([*each.parameters(), *head.parameters()])
    data = TensorDataset(torch.randn(80, 3, 100), torch.arange(80) % 5)
    for _epoch in range(2):
        for x, y in DataLoader(data, 8, drop_last=True):
            loss = F.cross_entropy(head(each(x.cuda()).max(2).values), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def two_views() -> None:
    """Two views of an image are near each other and far from all others in the batch."""
    body = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 32)).cuda()
    optimizer = torch.optim.AdamW(body.parameters())
    for _epoch in range(2):
        for one, other in DataLoader(Pairs(160), 16):
            z = F.normalize(body(torch.cat([one, other]).cuda()), dim=1)
            likeness = z @ z.T / 0.5
            likeness = likeness.masked_fill(torch.eye(len(z), device="cuda").bool(), -1e9)
            labels = torch.arange(len(z), device="cuda").roll(len(z) // 2)
            loss = F.cross_entropy(likeness, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def predictor_without_negatives() -> None:
    """A slow copy of the network gives the targets, and follows it."""
    online = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 32)).cuda()
    slow = copy.deepcopy(online)
    predict = nn.Linear(32, 32).cuda()
    optimizer = torch.optim.SGD([*online.parameters(), *predict.parameters()], 0.05, momentum=0.9)
    for _epoch in range(2):
        for one, other in DataLoader(Pairs(160), 16):
            one, other = one.cuda(), other.cuda()
            with torch.no_grad():
                wanted = F.normalize(slow(other), dim=1)
            loss = (2 - 2 * (F.normalize(predict(online(one)), dim=1) * wanted).sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, weight in zip(slow.parameters(), online.parameters(), strict=True):
                    mean.mul_(0.99).add_(weight, alpha=0.01)


def words_by_context() -> None:
    """Vectors of words by what stands around them, with negative samples."""
    inner, outer = nn.Embedding(500, 32).cuda(), nn.Embedding(500, 32).cuda()
    optimizer = torch.optim.Adagrad([*inner.parameters(), *outer.parameters()], 0.1)
    data = TensorDataset(torch.randint(0, 500, (640,)), torch.randint(0, 500, (640,)))
    for _epoch in range(2):
        for word, context in DataLoader(data, 64):
            word, context = word.cuda(), context.cuda()
            others = torch.randint(0, 500, (len(word), 5), device="cuda")
            vector = inner(word)
            near = F.logsigmoid((vector * outer(context)).sum(1))
            far = F.logsigmoid(-(outer(others) @ vector[:, :, None]).squeeze(2)).sum(1)
            loss = -(near + far).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def recommender() -> None:
    """Users and items as vectors, ratings by their product and a network."""
    users, items = nn.Embedding(100, 16).cuda(), nn.Embedding(200, 16).cuda()
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters(), *net.parameters()])
    data = TensorDataset(torch.randint(0, 100, (320,)), torch.randint(0, 200, (320,)), torch.rand(320))
    for _epoch in range(2):
        for user, item, rating in DataLoader(data, 32, shuffle=True):
            u, v = users(user.cuda()), items(item.cuda())
            guess = (u * v).sum(1) + net(torch.cat([u, v], 1)).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(guess, rating.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def truncated_through_time() -> None:
    """A long text in parts, whose state goes on without its gradient."""
    embedding, head = nn.Embedding(100, 32).cuda(), nn.Linear(64, 100).cuda()
    of_word, of_state = nn.Linear(32, 64).cuda(), nn.Linear(64, 64).cuda()
    parameters = [p for part in (embedding, of_word, of_state, head) for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, 1.0)
    text = torch.randint(0, 100, (401, 8)).cuda()
    for _epoch in range(2):
        state = torch.zeros(8, 64, device="cuda")
        for at in range(0, 400, 20):
            state, outputs = state.detach(), []
            for word in embedding(text[at : at + 20]):
                state = torch.tanh(of_word(word) + of_state(state))
                outputs.append(state)
            loss = F.cross_entropy(head(torch.stack(outputs)).flatten(0, 1), text[at + 1 : at + 21].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.25)
            optimizer.step()


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(100, 32), nn.Parameter(torch.zeros(1, 24, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.embedding(x) + self.place[:, : x.shape[1]]))
        return out


def masked_words() -> None:
    """Some words are hidden, and the network says which they were."""
    model = _Attention().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    for _epoch in range(2):
        for x, _ in tokens(160, 16):
            x = x.cuda()
            is_hidden = torch.rand(x.shape, device="cuda") < 0.15
            logits = model(x.masked_fill(is_hidden, 0))
            loss = F.cross_entropy(logits.flatten(0, 1), x.flatten(), reduction="none")
            loss = (loss * is_hidden.flatten()).sum() / is_hidden.sum().clamp(min=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def actor_and_critic() -> None:
    """Rollouts of a game, advantages, and several passes over each rollout with a clipped ratio."""
    body, actor, critic = nn.Linear(8, 64).cuda(), nn.Linear(64, 4).cuda(), nn.Linear(64, 1).cuda()
    parameters = [*body.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, 3e-4, eps=1e-5)
    for _update in range(5):
        states, actions, chances, rewards = [], [], [], []
        state = torch.randn(16, 8)
        with torch.no_grad():
            for _time in range(8):
                drawn = torch.distributions.Categorical(logits=actor(torch.tanh(body(state.cuda()))))
                action = drawn.sample()
                states.append(state)
                actions.append(action.cpu())
                chances.append(drawn.log_prob(action).cpu())
                state = torch.randn(16, 8)
                rewards.append(torch.rand(16))
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0).flatten()
        data = TensorDataset(torch.cat(states), torch.cat(actions), torch.cat(chances), returns)
        for _pass in range(2):
            for s, a, old, wanted in DataLoader(data, 32, shuffle=True):
                s, a, old, wanted = s.cuda(), a.cuda(), old.cuda(), wanted.cuda()
                hidden = torch.tanh(body(s))
                drawn = torch.distributions.Categorical(logits=actor(hidden))
                value = critic(hidden).squeeze(1)
                ratio = torch.exp(drawn.log_prob(a) - old)
                advantage = (wanted - value).detach()
                clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = -clipped.mean() + 0.5 * F.huber_loss(value, wanted) - 0.01 * drawn.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()


def two_critics() -> None:
    """Continuous actions: two critics, a policy that steps every second time, targets that follow slowly."""
    policy = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2), nn.Tanh()).cuda()
    critics = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)) for _ in range(2)).cuda()
    slow_policy, slow_critics = copy.deepcopy(policy), copy.deepcopy(critics)
    of_policy, of_critics = torch.optim.Adam(policy.parameters()), torch.optim.Adam(critics.parameters())
    memory: deque[torch.Tensor] = deque(maxlen=200)
    for _ in range(200):
        memory.append(torch.randn(15))
    for step in range(40):
        batch = torch.stack([memory[at] for at in torch.randint(0, 200, (32,)).tolist()]).cuda()
        state, action, reward, following = batch[:, :6], batch[:, 6:8], batch[:, 8:9], batch[:, 9:]
        with torch.no_grad():
            pair = torch.cat([following, slow_policy(following)], 1)
            wanted = reward + 0.99 * torch.min(slow_critics[0](pair), slow_critics[1](pair))
        pair = torch.cat([state, action], 1)
        loss = sum(F.huber_loss(critic(pair), wanted) for critic in critics)
        of_critics.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        of_critics.step()
        if step % 2:
            gain = -critics[0](torch.cat([state, policy(state)], 1)).mean()
            of_policy.zero_grad()
            gain.backward()
            of_policy.step()
            with torch.no_grad():
                for slow, fast in ((slow_policy, policy), (slow_critics, critics)):
                    for mean, weight in zip(slow.parameters(), fast.parameters(), strict=True):
                        mean.lerp_(weight, 0.005)


def rays_of_light() -> None:
    """A scene as a network: points along rays with waves of their places, colours added up along each."""
    net = nn.Sequential(nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), 5e-4)
    waves = (2.0 ** torch.arange(6, device="cuda")) * math.pi
    for _step in range(30):
        start, way = torch.randn(32, 3, device="cuda"), F.normalize(torch.randn(32, 3, device="cuda"), dim=1)
        depth = torch.linspace(2, 6, 16, device="cuda")
        points = start[:, None] + way[:, None] * depth[None, :, None]
        angle = (points[..., None] * waves).flatten(2)
        found = net(torch.cat([angle.sin(), angle.cos()], -1))
        opacity = 1 - torch.exp(-F.relu(found[..., 3]) * 0.25)
        passed = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], 1), 1)[:, :-1]
        colour = ((opacity * passed)[..., None] * found[..., :3].sigmoid()).sum(1)
        loss = F.l1_loss(colour, torch.rand(32, 3, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def style_of_an_image() -> None:
    """The image itself is trained: its features and their products are those of two others."""
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()).cuda().eval()
    for parameter in body.parameters():
        parameter.requires_grad_(False)

    def products(x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(2)
        return flat @ flat.transpose(1, 2) / flat.numel()

    with torch.no_grad():
        content, style = body(torch.rand(1, 3, 32, 32, device="cuda")), products(body(torch.rand(1, 3, 32, 32, device="cuda")))
    image = torch.rand(1, 3, 32, 32, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([image], 0.02)
    for _step in range(40):
        features = body(image)
        loss = F.l1_loss(features, content) + 1e3 * F.l1_loss(products(features), style)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


PROGRAMS: dict[Callable[[], object], int | None] = {
    sound_classification: 20,
    speech_to_text: 20,
    boxes_on_a_grid: 20,
    masks_with_overlap: 20,
    neighbours_in_batches: 20,
    points_in_space: 20,
    two_views: 20,
    predictor_without_negatives: 20,
    words_by_context: 20,
    recommender: 20,
    truncated_through_time: 40,
    masked_words: 20,
    actor_and_critic: 40,
    two_critics: 20,
    rays_of_light: 30,
    style_of_an_image: 40,
}
"""The programs, with the steps that each makes: those of the optimizer that begins last."""
