"""Rounds of nobody's, by which a draft that has come back shows that it answers, before a request depends on it."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from cluster.speculation.messages import ProposeRequest, RoundSizes
from cluster.speculation.messages.sizes import WIRE_DTYPES

WARM_UP_DEADLINE_S: Final = 10.0
"""For each. A CPU's interpreter takes seconds for its first round; a draft that has none to give isn't to be waited for
as long as one that a request needs."""

_PROMPT_TOKENS: Final = 64


def warm_up_requests(sizes: RoundSizes) -> Iterator[ProposeRequest]:
    """One of a step without drafts, one of a step with all of them, one of a prompt: a process's first rounds load and
    compile what later ones find."""
    for num_tokens in (1, 1 + sizes.num_speculative_tokens, _PROMPT_TOKENS):
        yield _blank(sizes, min(num_tokens, sizes.max_num_batched_tokens, sizes.max_model_len - 1))


def _blank(sizes: RoundSizes, num_tokens: int) -> ProposeRequest:
    """Of zeros. Its KV goes into block 0, vLLM's null block, which no request ever has."""
    slots = sizes.max_num_reqs
    return ProposeRequest(
        num_speculative_tokens=sizes.num_speculative_tokens,
        decode_graph_eligible=False,
        hidden_states=np.zeros((num_tokens, sizes.hidden_size), WIRE_DTYPES[sizes.hidden_dtype]),
        positions=np.arange(num_tokens, dtype=np.int64),
        query_start_loc=np.array([0, num_tokens], np.int32),
        idx_mapping=np.zeros(1, np.int64),
        num_scheduled_tokens=np.array([num_tokens], np.int32),
        seq_lens_cpu_upper_bound=np.array([num_tokens], np.int32),
        num_sampled=np.ones(1, np.int32),
        num_rejected=np.zeros(1, np.int32),
        last_sampled=np.zeros((slots, 1), np.int64),
        next_prefill_tokens=np.zeros((sizes.num_prefill_lookahead, slots), np.int32),
        temperature=np.zeros(slots, np.float32),
        seeds=np.zeros(slots, np.int64),
        block_tables=tuple(np.zeros((1, table.width), np.int32) for table in sizes.block_tables),
        kv_rows=tuple(np.zeros((num_tokens, size), WIRE_DTYPES[sizes.hidden_dtype]) for size in sizes.kv_row_sizes),
        input_ids=np.zeros(num_tokens, np.int32) if sizes.with_input_ids else None,
    )
