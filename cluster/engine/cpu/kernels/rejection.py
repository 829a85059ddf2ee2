"""Stand-ins for the kernels of `vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py`.

A request with n drafted tokens has n + 1 rows of logits: row i judges the draft that stands in `draft_sampled` at
row i + 1, the last row is the bonus token's. A draft of -1 is a placeholder that is never accepted. `draft_logits`
[R, K, V], before temperature, is None for drafts that were taken greedily: the draft's distribution is one-hot.

Sources of the rules: Leviathan et al. 2023 (arXiv 2211.17192) for `standard`, Sun et al. 2024 (arXiv 2403.10444)
for `block` verification.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.engine.cpu.kernels import noise
from cluster.engine.cpu.kernels.sampling import noised_argmax, store_row_maxima


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One request's part of a round. `start` is its first row of logits; its drafts are judged from there on."""

    index: int
    slot: int
    start: int
    drafts: list[int]
    temperature: float


def _requests(cu_num_logits: Tensor, slots: Tensor, draft_sampled: Tensor, temp: Tensor) -> list[_Request]:
    bounds, drafts, temperatures = cu_num_logits.tolist(), draft_sampled.tolist(), temp.tolist()
    return [
        _Request(index=i, slot=slot, start=start, drafts=drafts[start + 1 : end], temperature=temperatures[slot])
        for i, (slot, start, end) in enumerate(zip(slots.tolist(), bounds[:-1], bounds[1:], strict=True))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogProbs:
    """For every row but the last: the log-probability of the draft that it judges, and the row's log-sum.

    All are [T]; entries of bonus rows and placeholders mean nothing. The draft's are 0 where it is one-hot.
    """

    target: Tensor
    draft: Tensor
    target_lse: Tensor
    draft_lse: Tensor


def _log_probs(
    requests: list[_Request],
    target_logits: Tensor,
    target_local_max: Tensor,
    target_local_sumexp: Tensor,
    draft_sampled: Tensor,
    draft_logits: Tensor | None,
    draft_local_max: Tensor,
    draft_local_sumexp: Tensor,
) -> _LogProbs:
    tokens = draft_sampled.long().roll(-1).clamp(min=0)
    target_lse = _log_sum_exp(target_local_max, target_local_sumexp)
    target = target_logits.gather(1, tokens[:, None]).flatten().float() - target_lse
    draft, draft_lse = torch.zeros_like(target), torch.zeros_like(target)
    if draft_logits is not None:
        draft_lse = _log_sum_exp(draft_local_max, draft_local_sumexp)
        for request in requests:
            if request.temperature != 0.0 and request.drafts:
                rows = slice(request.start, request.start + len(request.drafts))
                steps = torch.arange(len(request.drafts))
                drafted = draft_logits[request.slot, steps, tokens[rows]].float()
                draft[rows] = drafted / request.temperature - draft_lse[rows]
    return _LogProbs(target=target, draft=draft, target_lse=target_lse, draft_lse=draft_lse)


def _log_sum_exp(local_max: Tensor, local_sumexp: Tensor) -> Tensor:
    """The blocks' statistics [T, blocks] as the log of each row's summed exponentials, [T]."""
    largest = local_max.max(dim=1).values
    return largest + (local_sumexp * (local_max - largest[:, None]).exp()).sum(dim=1).log()


def local_logits_stats(
    target_local_argmax: Tensor,
    target_local_max: Tensor,
    target_local_sumexp: Tensor,
    draft_local_max: Tensor,
    draft_local_sumexp: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    num_speculative_steps: int,
) -> None:
    """`_compute_local_logits_stats_kernel`: argmax, maximum and summed exponentials of each row, [T, blocks]."""
    rows = target_logits[:, :vocab_size].float()
    largest, ids = rows.max(dim=1)
    store_row_maxima(target_local_max, target_local_argmax, largest, ids)
    slots, steps = expanded_idx_mapping.long(), expanded_local_pos.long()
    temperature = temp[slots].float()
    if not bool((temperature != 0.0).any()):
        return
    _store_row_sum(target_local_sumexp, _sum_of_exponentials(rows, largest))
    if draft_logits is not None:
        drafted = (temperature != 0.0) & (steps < num_speculative_steps)
        scaled = torch.full_like(rows, float("-inf"))
        scaled[drafted] = draft_logits[slots[drafted], steps[drafted], :vocab_size].float()
        scaled[drafted] /= temperature[drafted, None]
        largest = scaled.max(dim=1).values
        draft_local_max.fill_(float("-inf"))
        draft_local_max[:, 0] = largest
        _store_row_sum(draft_local_sumexp, _sum_of_exponentials(scaled, largest))


def _sum_of_exponentials(rows: Tensor, largest: Tensor) -> Tensor:
    sums = (rows - largest[:, None]).exp().sum(dim=1)
    return torch.where(largest > float("-inf"), sums, 0.0)


def _store_row_sum(local_sums: Tensor, sums: Tensor) -> None:
    local_sums.zero_()
    local_sums[:, 0] = sums


def compute_cumulative_log_p(
    cumulative_log_p: Tensor,
    target_logits: Tensor,
    target_local_max: Tensor,
    target_local_sumexp: Tensor,
    draft_sampled: Tensor,
    draft_logits: Tensor | None,
    draft_local_max: Tensor,
    draft_local_sumexp: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temp: Tensor,
) -> None:
    """`_compute_cumulative_log_p_kernel`: block verification's running joint ratio after each draft, [T]."""
    requests = _requests(cu_num_logits, idx_mapping, draft_sampled, temp)
    log_probs = _log_probs(
        requests,
        target_logits,
        target_local_max,
        target_local_sumexp,
        draft_sampled,
        draft_logits,
        draft_local_max,
        draft_local_sumexp,
    )
    log_ratio = (log_probs.target - log_probs.draft).tolist()
    for request in requests:
        total = 0.0
        for row, token in enumerate(request.drafts, start=request.start):
            if token >= 0:
                total = min(total + log_ratio[row], 0.0)
            cumulative_log_p[row] = total


def compute_local_residual_mass(
    local_residual_mass: Tensor,
    cumulative_log_p: Tensor,
    target_logits: Tensor,
    target_local_max: Tensor,
    target_local_sumexp: Tensor,
    draft_logits: Tensor,
    draft_local_max: Tensor,
    draft_local_sumexp: Tensor,
    draft_sampled: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    num_speculative_steps: int,
) -> None:
    """`_compute_local_residual_mass_kernel`: what block verification leaves to resample from, [T, blocks].

    Only rows behind a request's first draft, whose own draft is no placeholder, have one.
    """
    target_lse = _log_sum_exp(target_local_max, target_local_sumexp)
    draft_lse = _log_sum_exp(draft_local_max, draft_local_sumexp)
    slots, steps = expanded_idx_mapping.tolist(), expanded_local_pos.tolist()
    drafts = draft_sampled.tolist()
    for row in range(target_logits.shape[0] - 1):
        temperature = float(temp[slots[row]])
        if not 0 < steps[row] < num_speculative_steps or drafts[row + 1] < 0 or temperature == 0.0:
            continue
        joint = cumulative_log_p[row - 1].exp()
        target = (target_logits[row, :vocab_size].float() - target_lse[row]).exp()
        draft = (draft_logits[slots[row], steps[row], :vocab_size].float() / temperature - draft_lse[row]).exp()
        _store_row_sum(local_residual_mass[row : row + 1], (joint * target - draft).clamp(min=0.0).sum())


def reject(
    sampled: Tensor,
    rejected_steps: Tensor,
    target_rejected_logsumexp: Tensor,
    draft_rejected_logsumexp: Tensor,
    target_logits: Tensor,
    target_local_argmax: Tensor,
    target_local_max: Tensor,
    target_local_sumexp: Tensor,
    draft_sampled: Tensor,
    draft_logits: Tensor | None,
    draft_local_max: Tensor,
    draft_local_sumexp: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    synthetic_conditional_rates: Tensor | None,
    cumulative_log_p: Tensor | None,
    local_residual_mass: Tensor | None,
) -> None:
    """`_rejection_kernel`: how many drafts of each request are accepted, [B], and the tokens, [B, K + 1].

    A greedy request's first rejected place already holds the target's own token; any other request's is filled
    by `resample`, which needs the two log-sums [B] that are left here for the rejected row.
    """
    requests = _requests(cu_num_logits, idx_mapping, draft_sampled, temp)
    slots = torch.repeat_interleave(idx_mapping.long(), cu_num_logits.diff().long())
    uniform = torch.from_numpy(noise.uniform_float32(seed[slots].numpy(), pos[: len(slots)].numpy()))
    choices = target_local_argmax.gather(1, target_local_max.argmax(dim=1, keepdim=True)).flatten().tolist()
    log_probs = None
    passes: list[bool] = []
    if any(request.temperature != 0.0 for request in requests):
        log_probs = _log_probs(
            requests,
            target_logits,
            target_local_max,
            target_local_sumexp,
            draft_sampled,
            draft_logits,
            draft_local_max,
            draft_local_sumexp,
        )
        # The ratio test p(x) > u q(x), in logarithms.
        passes = (log_probs.target > uniform.log() + log_probs.draft).tolist()
    for request in requests:
        rows = range(request.start, request.start + len(request.drafts))
        if synthetic_conditional_rates is not None:
            agrees = [bool(uniform[row] < synthetic_conditional_rates[step]) for step, row in enumerate(rows)]
        elif request.temperature == 0.0:
            agrees = [token == choices[row] for token, row in zip(request.drafts, rows, strict=True)]
        else:
            agrees = [passes[row] for row in rows]
        if log_probs is not None and cumulative_log_p is not None and request.temperature != 0.0:
            accepted = _accept_block(request, uniform, cumulative_log_p, local_residual_mass, log_probs.target)
        else:
            accepted = _accept(request, agrees)
        tokens = request.drafts[:accepted]
        if accepted < len(request.drafts):
            if request.temperature == 0.0:
                tokens.append(choices[request.start + accepted])
            elif log_probs is not None:
                target_rejected_logsumexp[request.index] = log_probs.target_lse[request.start + accepted]
                draft_rejected_logsumexp[request.index] = log_probs.draft_lse[request.start + accepted]
        sampled[request.index, : len(tokens)] = torch.tensor(tokens, dtype=sampled.dtype)
        rejected_steps[request.index] = accepted


def _accept(request: _Request, agrees: list[bool]) -> int:
    """The number of drafts before the first that is a placeholder or doesn't pass."""
    for step, (token, passed) in enumerate(zip(request.drafts, agrees, strict=True)):
        if token < 0 or not passed:
            return step
    return len(request.drafts)


def _accept_block(
    request: _Request,
    uniform: Tensor,
    cumulative_log_p: Tensor,
    local_residual_mass: Tensor | None,
    target_log_probs: Tensor,
) -> int:
    """The longest prefix whose uniform number is below its threshold: a later draft can rescue an earlier one."""
    accepted, count = 0, len(request.drafts)
    for step, token in enumerate(request.drafts):
        if token < 0:
            break
        row = request.start + step
        joint = math.exp(float(cumulative_log_p[row]))
        threshold = joint
        if step + 1 < count and request.drafts[step + 1] >= 0:
            if local_residual_mass is not None:
                mass = float(local_residual_mass[row + 1].sum())
            else:
                # A one-hot draft leaves all of the target's mass but the drafted token's.
                mass = joint * (1.0 - math.exp(float(target_log_probs[row + 1])))
            denominator = mass + 1.0 - joint
            threshold = mass / denominator if denominator > 0.0 else 1.0
        if float(uniform[row]) <= threshold:
            accepted = step + 1
    return accepted


def resample(
    resampled_local_argmax: Tensor,
    resampled_local_max: Tensor,
    target_logits: Tensor,
    target_rejected_logsumexp: Tensor,
    draft_logits: Tensor | None,
    draft_rejected_logsumexp: Tensor,
    rejected_step: Tensor,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    draft_sampled: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    cumulative_log_p: Tensor | None,
    vocab_size: int,
    use_fp64: bool,
    watermark: bool,
) -> None:
    """`_resample_kernel`: the token for each request's rejected place, or its bonus token, [B, blocks]."""
    if watermark:
        raise NotImplementedError("watermarked sampling has no CPU version: switch watermarking off")
    steps = rejected_step.tolist()
    # A greedy request's rejected place is filled already.
    requests = [
        request
        for request in _requests(cu_num_logits, expanded_idx_mapping[cu_num_logits[:-1].long()], draft_sampled, temp)
        if request.temperature != 0.0 or steps[request.index] == len(request.drafts)
    ]
    if not requests:
        return
    rows = torch.tensor([request.start + steps[request.index] for request in requests])
    slots = torch.tensor([request.slot for request in requests])
    scores = target_logits[rows, :vocab_size].float()
    for score, request in zip(scores, requests, strict=True):
        step = steps[request.index]
        if step == len(request.drafts) or request.drafts[step] < 0:
            continue
        if draft_logits is None:
            score[request.drafts[step]] = float("-inf")
            continue
        target = score - target_rejected_logsumexp[request.index]
        if cumulative_log_p is not None and step > 0:
            target = target + cumulative_log_p[request.start + step - 1]
        draft = draft_logits[request.slot, step, :vocab_size].float() / request.temperature
        score.copy_(_log_positive_difference(target, draft - draft_rejected_logsumexp[request.index]))
    values, ids = noised_argmax(
        scores,
        temperature=temp[slots],
        seed=seed[slots],
        position=pos[rows],
        divide_by_temperature=False,
        use_fp64=use_fp64,
    )
    places = torch.tensor([request.index for request in requests])
    local_max, local_argmax = resampled_local_max[places], resampled_local_argmax[places]
    store_row_maxima(local_max, local_argmax, values, ids)
    resampled_local_max[places], resampled_local_argmax[places] = local_max, local_argmax


def insert_resampled(
    sampled: Tensor,
    num_sampled: Tensor,
    resampled_local_argmax: Tensor,
    resampled_local_max: Tensor,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    temp: Tensor,
) -> None:
    """`_insert_resampled_kernel`: put the resampled token behind each request's accepted ones and count it.

    A greedy request's rejected place keeps the target's own token that `reject` left there.
    """
    accepted = num_sampled.long()
    rows = cu_num_logits[:-1].long() + accepted
    is_bonus = rows == cu_num_logits[1:] - 1
    blocks = resampled_local_max.nan_to_num(nan=float("-inf")).argmax(dim=1, keepdim=True)
    resampled = resampled_local_argmax.gather(1, blocks).flatten()
    taken = torch.nonzero(is_bonus | (temp[expanded_idx_mapping[rows].long()] != 0.0)).flatten()
    sampled[taken, accepted[taken]] = resampled[taken].to(sampled.dtype)
    num_sampled += 1


def _log_positive_difference(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log(max(p - q, 0)) as log p + log(1 - q / p), which keeps its precision where p and q are close."""
    ratio = (log_q - log_p).exp()
    return torch.where(ratio < 1.0, log_p + torch.log1p(-ratio), float("-inf"))
