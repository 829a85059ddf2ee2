"""Stand-ins for the kernels of `vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py`.

A request with n drafted tokens has n + 1 rows of logits: row i judges the draft that stands in `draft_sampled` at
row i + 1, the last row is the bonus token's. A draft of -1 is a placeholder that is never accepted. `draft_logits`
[R, K, V], before temperature, is None for drafts that were taken greedily: the draft's distribution is one-hot.
Under Triton's interpreter the rejection kernel fails for requests that are not greedy.

Sources of the rules: Leviathan et al. 2023 (arXiv 2211.17192) for `standard`, Sun et al. 2024 (arXiv 2403.10444)
for `block` verification.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.engine.cpu.kernels import noise
from cluster.engine.cpu.kernels.sampling import noised_argmax, store_row_maxima


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One request's part of a round: its rows of logits and its drafted tokens."""

    index: int
    slot: int
    start: int
    drafts: list[int]
    temperature: float

    @property
    def rows(self) -> slice:
        """The rows that judge its drafts (the bonus row left out)."""
        return slice(self.start, self.start + len(self.drafts))


def _requests(cu_num_logits: Tensor, idx_mapping: Tensor, draft_sampled: Tensor, temp: Tensor) -> Iterator[_Request]:
    bounds, drafts = cu_num_logits.tolist(), draft_sampled.tolist()
    for index, slot in enumerate(idx_mapping.tolist()):
        start, end = bounds[index], bounds[index + 1]
        yield _Request(
            index=index,
            slot=slot,
            start=start,
            drafts=drafts[start + 1 : end],
            temperature=float(temp[slot]),
        )


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


def _log_sum_exp(local_max: Tensor, local_sumexp: Tensor) -> Tensor:
    """The blocks' statistics [n, blocks] as the log of each row's summed exponentials, [n]."""
    largest = local_max.max(dim=1).values
    return largest + (local_sumexp * (local_max - largest[:, None]).exp()).sum(dim=1).log()


def _draft_log_probs(
    request: _Request,
    target_logits: Tensor,
    target_lse: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each of the request's drafts under the target and under the draft, [n] each.

    The second is 0 where the draft is one-hot. Entries of placeholders mean nothing.
    """
    tokens = torch.tensor(request.drafts, dtype=torch.int64).clamp(min=0)[:, None]
    target = target_logits[request.rows].gather(1, tokens).flatten().float() - target_lse
    if draft_logits is None:
        return target, torch.zeros_like(target)
    drafted = draft_logits[request.slot, : len(request.drafts)].gather(1, tokens).flatten().float()
    return target, drafted / request.temperature - draft_lse


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
    for request in _requests(cu_num_logits, idx_mapping, draft_sampled, temp):
        if request.temperature == 0.0 or not request.drafts:
            continue
        rows = request.rows
        target, draft = _draft_log_probs(
            request,
            target_logits,
            _log_sum_exp(target_local_max[rows], target_local_sumexp[rows]),
            draft_logits,
            _log_sum_exp(draft_local_max[rows], draft_local_sumexp[rows]),
        )
        total = 0.0
        for step, token in enumerate(request.drafts):
            if token >= 0:
                total = min(total + float(target[step] - draft[step]), 0.0)
            cumulative_log_p[request.start + step] = total


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
    for request in _requests(cu_num_logits, idx_mapping, draft_sampled, temp):
        count, rows = len(request.drafts), request.rows
        positions = pos[rows].long().numpy()
        seeds = seed[request.slot].long().expand(count).numpy()
        uniform = torch.from_numpy(noise.uniform_float32(seeds, positions))
        rates = synthetic_conditional_rates[:count] if synthetic_conditional_rates is not None else None
        target_lse = draft_lse = torch.zeros(count)
        if request.temperature == 0.0:
            blocks = target_local_max[rows].argmax(dim=1, keepdim=True)
            choices = target_local_argmax[rows].gather(1, blocks).flatten().tolist()
            passes = (uniform < rates).tolist() if rates is not None else None
            accepted = _accept_greedy(request, choices, passes)
            tokens = request.drafts[:accepted] + choices[accepted : accepted + 1]
        else:
            target_lse = _log_sum_exp(target_local_max[rows], target_local_sumexp[rows])
            if draft_logits is not None:
                draft_lse = _log_sum_exp(draft_local_max[rows], draft_local_sumexp[rows])
            target, draft = _draft_log_probs(request, target_logits, target_lse, draft_logits, draft_lse)
            if cumulative_log_p is not None:
                accepted = _accept_block(request, uniform, cumulative_log_p, local_residual_mass, target)
            else:
                # The ratio test p(x) > u q(x), in logarithms.
                test = uniform < rates if rates is not None else target > uniform.log() + draft
                accepted = _accept_standard(request, test.tolist())
            tokens = request.drafts[:accepted]
        sampled[request.index, : len(tokens)] = torch.tensor(tokens, dtype=sampled.dtype)
        rejected_steps[request.index] = accepted
        if accepted < count:
            target_rejected_logsumexp[request.index] = target_lse[accepted]
            draft_rejected_logsumexp[request.index] = draft_lse[accepted]


def _accept_greedy(request: _Request, choices: list[int], synthetic: list[bool] | None) -> int:
    for step, (token, choice) in enumerate(zip(request.drafts, choices, strict=True)):
        agrees = synthetic[step] if synthetic is not None else token == choice
        if token < 0 or not agrees:
            return step
    return len(request.drafts)


def _accept_standard(request: _Request, passes: list[bool]) -> int:
    for step, (token, passed) in enumerate(zip(request.drafts, passes, strict=True)):
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
        joint = math.exp(float(cumulative_log_p[request.start + step]))
        threshold = joint
        if step + 1 < count and request.drafts[step + 1] >= 0:
            if local_residual_mass is not None:
                mass = float(local_residual_mass[request.start + step + 1].sum())
            else:
                # A one-hot draft leaves all of the target's mass but the drafted token's.
                mass = joint * (1.0 - math.exp(float(target_log_probs[step + 1])))
            denominator = mass + 1.0 - joint
            threshold = mass / denominator if denominator > 0.0 else 1.0
        if float(uniform[step]) <= threshold:
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
    """`_resample_kernel`: the token in the place of each request's rejected draft, or its bonus token, [B, blocks]."""
    if watermark:
        raise NotImplementedError("watermarked sampling has no CPU version: switch watermarking off")
    first_rows = expanded_idx_mapping[cu_num_logits[:-1].long()]
    for request in _requests(cu_num_logits, first_rows, draft_sampled, temp):
        step = int(rejected_step[request.index])
        is_bonus = step == len(request.drafts)
        if request.temperature == 0.0 and not is_bonus:
            continue
        row = request.start + step
        scores = target_logits[row, :vocab_size].float()
        if not is_bonus and request.drafts[step] >= 0:
            if draft_logits is None:
                scores = scores.clone()
                scores[request.drafts[step]] = float("-inf")
            else:
                target = scores - target_rejected_logsumexp[request.index]
                if cumulative_log_p is not None and step > 0:
                    target = target + cumulative_log_p[row - 1]
                draft = draft_logits[request.slot, step, :vocab_size].float() / request.temperature
                scores = _log_positive_difference(target, draft - draft_rejected_logsumexp[request.index])
        values, ids = noised_argmax(
            scores[None],
            temperature=torch.tensor([request.temperature]),
            seed=seed[request.slot : request.slot + 1],
            position=pos[row : row + 1],
            divide_by_temperature=False,
            use_fp64=use_fp64,
        )
        place = slice(request.index, request.index + 1)
        store_row_maxima(resampled_local_max[place], resampled_local_argmax[place], values, ids)


def _log_positive_difference(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log(max(p - q, 0)) as log p + log(1 - q / p), which keeps its precision where p and q are close."""
    ratio = (log_q - log_p).exp()
    return torch.where(ratio < 1.0, log_p + torch.log1p(-ratio), float("-inf"))
