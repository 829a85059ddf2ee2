"""The training loop: batches in, a trained draft out; a stopped run resumes where its last checkpoint was."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.training.data import Batch, Batches
from cluster.training.loss import BlockLoss, block_loss
from cluster.training.model import DraftModel, TargetModel

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_GRADIENT_NORM = 1.0
_WARM_UP = 0.03  # of all steps
_LOG_EVERY_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """`batch_size` sequences a step, `anchors` blocks of each; `learning_rate` is the peak of warm-up and cosine."""

    steps: int
    batch_size: int
    anchors: int
    learning_rate: float
    checkpoint_steps: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """Means since the last report; `acceptance_length` is what these blocks would give when drafted greedily."""

    step: int
    loss: float
    cross_entropy: float
    divergence: float
    confidence: float
    acceptance_length: float
    learning_rate: float


def train(
    model: DraftModel,
    target: TargetModel,
    batches: Batches,
    settings: TrainingSettings,
    *,
    folder: Path,
    on_step: Callable[[int], None],
    on_report: Callable[[TrainingReport], None],
) -> None:
    """Train `model` in place, with `folder`/checkpoint.pt to resume from and `folder`/log.jsonl of all reports.

    Everything random follows from the seed and the step, so a resumed run makes what an unbroken one makes.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=_BETAS,
        weight_decay=_WEIGHT_DECAY,
        fused=device.type == "cuda",
    )
    checkpoint = folder / "checkpoint.pt"
    start = _resume(checkpoint, model, optimizer)
    recent: list[Tensor] = []
    for step in range(start, settings.steps):
        rate = settings.learning_rate * _schedule(step, settings.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = _loss(model, target, batches[step], settings, step)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(
            torch.stack(
                [loss.total.detach(), loss.cross_entropy, loss.divergence, loss.confidence, loss.acceptance_length]
            )
        )
        done = step + 1
        on_step(done)
        if done % _LOG_EVERY_STEPS == 0 or done == settings.steps:
            report = _report(done, recent, rate)
            with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(asdict(report)) + "\n")
            on_report(report)
            recent.clear()
        if done % settings.checkpoint_steps == 0 or done == settings.steps:
            _save(checkpoint, model, optimizer, done)


def _loss(model: DraftModel, target: TargetModel, batch: Batch, settings: TrainingSettings, step: int) -> BlockLoss:
    device = target.head.device
    tokens = batch.tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch.tokens
    starts, ends = batch.starts.to(device), batch.ends.to(device)
    states, last = target.states(tokens)
    if step == 0:
        model.adopt(target.norm, states[:, 1:].flatten(0, 1))  # not the first token's states: they are outliers
    generator = torch.Generator(device).manual_seed(settings.seed * 1_000_003 + step)
    anchors = draw_anchors(tokens, starts, ends, settings.anchors, generator)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        return blocks_loss(model, target, tokens, states, last, anchors, ends)


def draw_anchors(tokens: Tensor, starts: Tensor, ends: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Positions [B, A] of different answer tokens that have a successor; where there are too few, `ends` fills up."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    possible = (positions >= starts[:, None]) & (positions < ends[:, None] - 1)
    lots = torch.rand(tokens.shape, generator=generator, device=tokens.device).masked_fill(~possible, -1.0)
    best = lots.topk(min(count, tokens.shape[1]), dim=1)
    return torch.where(best.values >= 0, best.indices, ends[:, None])


def blocks_loss(
    model: DraftModel, target: TargetModel, tokens: Tensor, states: Tensor, last: Tensor, anchors: Tensor, ends: Tensor
) -> BlockLoss:
    """The loss of the blocks after `anchors` [B, A], given the target's states of `tokens` [B, S]."""
    block = model.shape.block_size
    places = anchors[..., None] + torch.arange(block, device=tokens.device)  # of a block's inputs
    valid = (places + 1 < ends[:, None, None]).flatten(0, 1)
    before, after = (_take(tokens, at).flatten(0, 1) for at in (places, places + 1))

    inputs = _take(tokens, places).masked_fill(torch.arange(block, device=tokens.device) > 0, model.shape.mask_token_id)
    hidden = model(states, target.embed(inputs), anchors).flatten(0, 1)
    markov = model.markov_head.markov_w1(before)
    logits = torch.nn.functional.linear(hidden, target.head) + model.markov_head.markov_w2(markov)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    target_logits = torch.nn.functional.linear(
        last[rows, places.clamp_max(tokens.shape[1] - 1)].flatten(0, 1), target.head
    )
    return block_loss(
        logits=logits,
        target_logits=target_logits,
        # Its gradient stays in the head: what it learns shall not cost the draft any acceptance.
        confidence_logits=model.confidence_head(hidden.detach(), markov.detach()),
        tokens=after,
        valid=valid,
        compiled=tokens.device.type == "cuda",
    )


def _take(tokens: Tensor, places: Tensor) -> Tensor:
    """`tokens` [B, S] at `places` [B, A, K]; beyond S, its last."""
    flat = places.clamp_max(tokens.shape[1] - 1).flatten(1)
    return tokens.gather(1, flat).unflatten(1, places.shape[1:])


def _schedule(step: int, steps: int) -> float:
    warm_up = max(1, int(_WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _report(step: int, recent: list[Tensor], rate: float) -> TrainingReport:
    total, cross_entropy, divergence, confidence, acceptance = torch.stack(recent).mean(dim=0).tolist()
    return TrainingReport(
        step=step,
        loss=total,
        cross_entropy=cross_entropy,
        divergence=divergence,
        confidence=confidence,
        acceptance_length=acceptance,
        learning_rate=rate,
    )


def _resume(checkpoint: Path, model: DraftModel, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, and return the number of steps that it has behind it."""
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, map_location=next(model.parameters()).device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _save(checkpoint: Path, model: DraftModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    unfinished = checkpoint.with_suffix(".unfinished")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
    unfinished.replace(checkpoint)
