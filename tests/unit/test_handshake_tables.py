"""Which block tables travel, and who follows which: read off the contract by each side for its own groups."""

from dataclasses import replace

import pytest
from dspark.v1.control_pb2 import RoundOptions

from cluster.contract.contract import KVContract
from cluster.contract.errors import DocumentError
from cluster.contract.negotiate import negotiate
from cluster.contract.policy import Policy
from cluster.speculation.handshake import mirrored_layers, round_sizes, tables, tables_to_follow, tables_to_send
from tests.unit.test_contract_pairs import gemma_4_dflash, gemma_4_mtp

OPTIONS = RoundOptions(block_table_widths=[2560, 2560], num_prefill_lookahead=1)


def layers(name: str, count: int) -> list[str]:
    return [f"{name}.layers.{i}.self_attn.attn" for i in range(count)]


@pytest.fixture(scope="module")
def contract() -> KVContract:
    """A hybrid target, and a draft with a group on each of its tables and two on one of them."""
    target, draft = gemma_4_dflash()
    (full,) = draft.groups
    window = {"kind": "sliding_window", "sliding_window": 1024}
    groups = [
        replace(full, name=name, layers=tuple(layers(name, 2)), **more)
        for name, more in (("a", window), ("b", {}), ("c", {}))
    ]
    return negotiate(target, replace(draft, groups=tuple(groups)), Policy())


def test_each_side_finds_the_tables_among_its_own_groups(contract: KVContract) -> None:
    assert tables(contract) == ("sliding", "full")
    # vLLM's groups come in any order, and may be parts of what the contract has as one.
    assert tables_to_send(contract, [layers("full", 10), layers("sliding", 5), layers("sliding", 10)[5:]]) == (1, 0)
    assert tables_to_follow(contract, [layers("b", 2), layers("a", 2), layers("c", 2)]) == (1, 0, 1)


def test_sizes_are_the_contracts_and_what_it_doesnt_have_is_offered(contract: KVContract) -> None:
    sizes = round_sizes(contract, OPTIONS)
    assert [table.block_size for table in sizes.block_tables] == [16, 16]
    assert {table.num_blocks for table in sizes.block_tables} == {contract.num_blocks}
    assert (sizes.num_speculative_tokens, sizes.hidden_dtype) == (7, "bfloat16")


def test_a_draft_that_reads_the_targets_kv_follows_the_same_tables_whichever_way() -> None:
    mapped, mirrored = (negotiate(*gemma_4_mtp(), Policy(kv_sharing=way)) for way in ("map", "mirror"))
    reads = [[layer, f"draft_model.{i}"] for i, layer in enumerate(mirrored_layers(mirrored))]
    for contract in (mapped, mirrored):
        assert tables(contract) == ("full", "sliding")
        assert tables_to_follow(contract, reads[::-1]) == (1, 0)
    assert mirrored_layers(mapped) == {}
    # Of a token: K and V of all heads, in elements.
    sizes = [round_sizes(contract, OPTIONS).kv_row_sizes for contract in (mapped, mirrored)]
    assert sizes == [(), tuple(group.row_bytes // 2 for group in mirrored.mirrors)]


@pytest.mark.parametrize("wrong", [{"block_table_widths": [1, 2560]}, {"num_prefill_lookahead": 0}])
def test_an_offer_that_doesnt_fit_is_no_crash(contract: KVContract, wrong: dict[str, object]) -> None:
    options = RoundOptions(**({"num_prefill_lookahead": 1, "block_table_widths": [2560, 2560]} | wrong))
    with pytest.raises(DocumentError):
        round_sizes(contract, options)
