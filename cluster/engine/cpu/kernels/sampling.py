"""Stand-ins for the kernels of `vllm/v1/worker/gpu/sample` and of structured output.

All tensors are written in place, as the kernels do. `expanded_idx_mapping` [T] maps a row of logits to its request
slot; -1 marks a row of padding.
"""

import torch
from torch import Tensor

from cluster.engine.cpu.kernels import noise


def noised_argmax(
    logits: Tensor,
    *,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    divide_by_temperature: bool,
    use_fp64: bool,
) -> tuple[Tensor, Tensor]:
    """Gumbel-max sampling of each row; plain argmax where the temperature is 0.

    logits [T, V]; temperature, seed, position [T]. Returns the winning scores [T] and their token ids [T].
    """
    scores = logits.to(torch.float64 if use_fp64 else torch.float32)
    sampled_rows = torch.nonzero(temperature).flatten().tolist()
    if not sampled_rows:
        return tuple(scores.max(dim=1))
    draw = noise.gumbel_float64 if use_fp64 else noise.gumbel_float32
    scores = scores.clone()
    for row in sampled_rows:
        if divide_by_temperature:
            # In single precision whatever the noise's precision is, as the kernel divides.
            scores[row] = logits[row].float() / temperature[row]
        scores[row] += torch.from_numpy(draw(int(seed[row]), int(position[row]), logits.shape[1]))
    return tuple(scores.max(dim=1))


def store_row_maxima(local_max: Tensor, local_argmax: Tensor, values: Tensor, ids: Tensor) -> None:
    """Write whole-row maxima [T] where the kernel keeps one maximum a block, [T, blocks]: block 0 wins."""
    local_max.fill_(float("-inf"))
    local_max[:, 0] = values
    local_argmax.copy_(ids[:, None])


def gumbel_sample(
    local_argmax: Tensor,
    local_max: Tensor,
    logits_cache: Tensor | None,
    logits_cache_col: Tensor | None,
    logits_cache_source: Tensor | None,
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    seeds: Tensor,
    pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    is_drafting: bool,
    apply_temperature: bool,
    use_fp64: bool,
) -> None:
    """`_gumbel_sample_kernel`: one token for each row of logits [T, V].

    While drafting it also keeps the logits of each request, before temperature, in logits_cache [R, columns, V] for
    the rejection sampler that judges the draft later.
    """
    slots = expanded_idx_mapping.long()
    valid = slots >= 0
    if logits_cache is not None and logits_cache_col is not None and logits_cache_source is not None:
        columns = logits_cache_col.long().expand(slots.shape)[valid]
        logits_cache[slots[valid], columns, :vocab_size] = logits_cache_source[valid, :vocab_size]
    safe = slots.clamp(min=0)
    values, ids = noised_argmax(
        logits[:, :vocab_size],
        temperature=torch.where(valid, temp[safe].float(), 0.0),
        seed=torch.where(valid, seeds[safe], 0),
        position=pos + noise.DRAFT_NOISE_SALT if is_drafting else pos,
        divide_by_temperature=apply_temperature,
        use_fp64=use_fp64,
    )
    store_row_maxima(local_max, local_argmax, values, ids)


def apply_temperature(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor, vocab_size: int) -> None:
    """`_temperature_kernel`: divide each row by its temperature; 0 means greedy and leaves the row as it is."""
    divisor = temperature[expanded_idx_mapping.long()].float()
    logits[:, :vocab_size] /= torch.where(divisor == 0.0, 1.0, divisor)[:, None]


def apply_min_p(logits: Tensor, expanded_idx_mapping: Tensor, min_p: Tensor, vocab_size: int) -> None:
    """`_min_p_kernel`: mask what is less likely than min_p times the row's likeliest token."""
    share = min_p[expanded_idx_mapping.long()].float()
    rows = logits[:, :vocab_size]
    # log(0) is -inf, below which nothing is: a row without min_p stays as it is.
    threshold = rows.max(dim=1).values.float() + share.log()
    rows.masked_fill_(rows < threshold[:, None], float("-inf"))


def apply_penalties(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    token_ids: Tensor,
    expanded_local_pos: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
    prompt_bin_mask: Tensor,
    output_bin_counts: Tensor,
    vocab_size: int,
) -> None:
    """`_penalties_kernel`: repetition, frequency and presence penalties.

    prompt_bin_mask [R, ceil(V / 32)] int32 has a bit for each token of the prompt; output_bin_counts [R, V] counts
    the tokens of the output. A row at position p of its request's draft counts the p drafted tokens before it too;
    these stand in token_ids [T] behind the request's first row. An invalid draft, -1, is no token.
    """
    for row, slot in enumerate(expanded_idx_mapping.tolist()):
        repetition = float(repetition_penalty[slot])
        frequency, presence = float(frequency_penalty[slot]), float(presence_penalty[slot])
        if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
            continue
        position = int(expanded_local_pos[row])
        drafted = token_ids[row - position + 1 : row + 1].long()
        counts = output_bin_counts[slot, :vocab_size] + torch.bincount(drafted[drafted >= 0], minlength=vocab_size)
        scores = logits[row, :vocab_size].float()
        if repetition != 1.0:
            in_prompt = unpack_bits(prompt_bin_mask[slot])[:vocab_size]
            scale = torch.where(in_prompt | (counts > 0), repetition, 1.0)
            scores = scores * torch.where(scores > 0, 1.0 / scale, scale)
        logits[row, :vocab_size] = scores - frequency * counts - presence * (counts > 0)


def unpack_bits(words: Tensor) -> Tensor:
    """The bits of int32 words [..., n] as booleans [..., 32 n], lowest bit first."""
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten(-2).bool()


def topk_log_softmax(output: Tensor, logits: Tensor, topk_ids: Tensor, topk: int, vocab_size: int) -> None:
    """`_topk_log_softmax_kernel`: log-probabilities [T, topk] of the named tokens."""
    rows = logits[:, :vocab_size].float()
    largest = rows.max(dim=1, keepdim=True).values
    log_sum = (rows - largest).exp().sum(dim=1, keepdim=True).log()
    output.view(-1, topk).copy_(rows.gather(1, topk_ids[:, :topk].long()) - largest - log_sum)


def ranks(output: Tensor, logits: Tensor, token_ids: Tensor, vocab_size: int) -> None:
    """`_ranks_kernel`: how many tokens are at least as likely as the sampled one, [T]."""
    rows = logits[:, :vocab_size]
    output.copy_((rows >= rows.gather(1, token_ids.long()[:, None])).sum(dim=1))


def apply_grammar_bitmask(
    logits: Tensor,
    logits_indices: Tensor,
    cu_num_logits: Tensor,
    bitmask: Tensor,
    vocab_size: int,
    mask_stride: int,
) -> None:
    """`_apply_grammar_bitmask_kernel`: mask the tokens that the grammar forbids.

    Row i of bitmask [n, ceil(V / 32)] is for position `logits_indices[i] % mask_stride` of request
    `logits_indices[i] // mask_stride`, whose rows of logits start at `cu_num_logits`.
    """
    starts = cu_num_logits.tolist()
    for mask_row, index in enumerate(logits_indices[: bitmask.shape[0]].tolist()):
        request, position = divmod(index, mask_stride)
        row = starts[request] + position
        if row < starts[request + 1]:
            allowed = unpack_bits(bitmask[mask_row])[:vocab_size]
            logits[row, : allowed.shape[0]].masked_fill_(~allowed, float("-inf"))
