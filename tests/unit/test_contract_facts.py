"""Facts and contracts as documents: what goes out comes back, and nothing else gets in."""

import copy
import json
import pickle
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractError, ContractViolation, DocumentError, Writer
from cluster.contract.facts import SideFacts
from cluster.contract.policy import Policy
from tests.unit.test_contract_pairs import PAIRS, contract_of, deepseek_v4, format, qwen3_8b


def document() -> dict[str, Any]:
    return json.loads(qwen3_8b()[1].to_json())  # type: ignore[no-any-return]


def refused(plain: object) -> DocumentError:
    with pytest.raises(DocumentError) as refusal:
        SideFacts.from_json(json.dumps(plain))
    return refusal.value


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)
def test_facts_and_contract_survive_json(pair: Any) -> None:
    for facts in pair():
        assert SideFacts.from_json(facts.to_json()) == facts
    contract = contract_of(pair())
    read = KVContract.from_json(contract.to_json())
    assert (read, read.digest) == (contract, contract.digest)


def test_a_contract_that_was_changed_on_its_way_is_noticed() -> None:
    plain = json.loads(contract_of(qwen3_8b()).to_json())
    plain["num_blocks"] += 1
    with pytest.raises(DocumentError) as refusal:
        KVContract.from_json(json.dumps(plain))
    assert refusal.value.path == "digest"


@pytest.mark.parametrize(
    ("at", "value", "path"),
    [
        (("vocab_size",), "151936", "vocab_size"),
        (("vocab_size",), 151936.0, "vocab_size"),
        (("vocab_size",), True, "vocab_size"),
        (("vocab_size",), None, "vocab_size"),
        (("enable_prefix_caching",), 1, "enable_prefix_caching"),
        (("role",), "drafter", "role"),
        (("compute_capability",), [9], "compute_capability"),
        (("groups",), {}, "groups"),
        (("groups",), [], "groups"),
        (("groups", 0, "kind"), "gqa", "groups[0].kind"),
        (("groups", 0, "block_size"), 0, "groups[0].block_size"),
        (("groups", 0, "layers", 3), 3, "groups[0].layers[3]"),
        (("groups", 0, "backends", 1, "name"), 7, "groups[0].backends[1].name"),
        (("groups", 0, "backends", 1, "layouts"), ["NHD"], "groups[0].backends[1].layouts[0]"),
        (("groups", 0, "backends", 0, "formats", 0, "num_heads"), -1, "groups[0].backends[0].formats[0].num_heads"),
        (("groups", 0, "infeasible", 0, "why"), "because", "groups[0].infeasible[0].why"),
        (("colour",), "red", "colour"),
        (("schema",), "dspark-cluster/facts/0", "schema"),
    ],
)
def test_foreign_facts_are_refused_with_the_path_of_the_key(at: tuple[Any, ...], value: object, path: str) -> None:
    plain: Any = document()
    spot = plain
    for key in at[:-1]:
        spot = spot[key]
    spot[at[-1]] = value
    assert refused(plain).path == path


def test_a_missing_key_is_named() -> None:
    plain = document()
    del plain["groups"][0]["head_size"]
    error = refused(plain)
    assert (error.path, error.found) == ("groups[0].head_size", "missing")


def test_a_key_that_has_a_default_may_be_missing() -> None:
    plain = document()
    del plain["constructor_writes"], plain["groups"][0]["scales"]
    assert SideFacts.from_json(json.dumps(plain)) == qwen3_8b()[1]


def test_a_target_has_no_groups_of_the_draft() -> None:
    plain = document()
    plain["role"] = "target"
    assert refused(plain).path == "groups"


def test_two_groups_of_one_name_are_refused() -> None:
    plain = document()
    plain["groups"] *= 2
    assert refused(plain).path == "groups"


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, "\ud800", "1" * 5000, b"\xff"]
)
def test_text_that_is_no_document_is_refused_as_such(text: Any) -> None:
    with pytest.raises(DocumentError):
        SideFacts.from_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(value=JSON, data=st.data())
def test_any_value_anywhere_gives_facts_or_a_document_error(value: object, data: st.DataObject) -> None:
    plain = document()
    spot: Any = plain
    while True:
        key = data.draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
        if not spot[key] or not isinstance(spot[key], dict | list) or data.draw(st.booleans()):
            break
        spot = spot[key]
    spot[key] = value
    with suppress(DocumentError):  # nothing else may come out
        assert SideFacts.from_json(json.dumps(plain)).role == "draft"


def test_errors_cross_process_borders() -> None:
    writer = Writer(class_name="Layer", function="Layer.__init__", location="vllm/layer.py:1")
    errors = (
        ContractError("field", target="1", draft=None, reason="it differs", remedy="make it equal"),
        ContractViolation("field", old=1, new="2", reason="sealed", writer=writer),
        DocumentError("groups[0]", "null", "an object"),
    )
    for error in errors:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
        assert type(again) is type(error)
        assert str(again) == str(error)


def test_facts_and_contracts_cannot_be_changed() -> None:
    contract = contract_of(deepseek_v4())
    with pytest.raises(AttributeError):
        contract.num_blocks = 1  # type: ignore[misc]
    assert copy.deepcopy(contract).digest == contract.digest


@pytest.mark.parametrize("wrong", [{"attention_backend": None}, {"kv_cache_dtype": ""}, {"num_gpu_blocks": 0}])
def test_a_policy_says_a_word_and_never_none(wrong: Any) -> None:
    with pytest.raises(DocumentError):
        Policy(**wrong)


def test_a_format_needs_sizes_that_exist() -> None:
    with pytest.raises(DocumentError):
        format(heads=1, state_content_bytes=0)
    with pytest.raises(DocumentError):
        format(tokens_per_state=0)
