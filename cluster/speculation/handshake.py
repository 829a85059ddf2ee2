"""What both sides make of their contract before the first round: sizes of messages, and which block tables travel.

target                                              draft
ChannelOffer     channel, what isn't in      ──▶    checks that the tables are its own's width
                 the contract               ◀──     ChannelAcceptance
accepts          ··········· channel ···········    opens, serves
"""

from collections.abc import Sequence
from typing import Final

from dspark.v1.control_pb2 import RoundOptions

from cluster.contract.codec import from_plain
from cluster.contract.contract import GroupContract, KVContract
from cluster.speculation.messages import RoundSizes

_ELEMENT_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}
"""Of what the caches are made of."""


def round_sizes(contract: KVContract, options: RoundOptions) -> RoundSizes:
    """How large a round can be: the same on both sides, which hold the same contract and options.

    Raises:
        DocumentError: the options are none of this contract's.
    """
    widths = zip(tables(contract), options.block_table_widths, strict=True)
    return from_plain(
        RoundSizes,
        {
            "max_num_reqs": contract.wire.max_num_seqs,
            "max_num_batched_tokens": contract.wire.max_num_batched_tokens,
            "max_model_len": contract.target.max_model_len,
            "num_speculative_tokens": contract.wire.num_speculative_tokens,
            "num_prefill_lookahead": options.num_prefill_lookahead,
            "hidden_size": contract.wire.hidden_size,
            "hidden_dtype": contract.wire.dtype,
            "vocab_size": contract.wire.vocab_size,
            "block_tables": [
                {"width": width, "block_size": _mirrored(contract, table).block_size, "num_blocks": contract.num_blocks}
                for table, width in widths
            ],
            "with_input_ids": options.with_input_ids,
            "kv_row_sizes": [
                group.row_bytes // _ELEMENT_BYTES[group.dtype] for group in mirrored_layers(contract).values()
            ],
        },
    )


def tables(contract: KVContract) -> tuple[str, ...]:
    """The target's block tables that travel, in the order in which they do: those that the draft's groups follow."""
    return tuple(dict.fromkeys(group.block_table for group in contract.groups_of_draft_layers))


def mirrored_layers(contract: KVContract) -> dict[str, GroupContract]:
    """The target's layers whose rows travel, in the order in which they do, each with the group of the draft's."""
    return {layer: group for group in contract.mirrors for layer in group.layers}


def tables_to_send(contract: KVContract, groups: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """For each table that travels, which of the target's `groups` has it: vLLM's groups, as the layers of each."""
    own = [_table_of(contract.groups_of("target"), layers) for layers in groups]
    return tuple(own.index(table) for table in tables(contract))


def tables_to_follow(contract: KVContract, groups: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """For each of the draft's `groups`, which of the tables that travel it follows."""
    travelling = tables(contract)
    return tuple(travelling.index(_table_of(contract.groups_of_draft_layers, layers)) for layers in groups)


def _table_of(groups: Sequence[GroupContract], layers: Sequence[str]) -> str:
    return next(group.block_table for group in groups if not set(layers).isdisjoint(group.layers))


def _mirrored(contract: KVContract, table: str) -> GroupContract:
    return next(group for group in contract.groups_of("target") if group.block_table == table)
