"""The messages of a round: what is sent arrives, what isn't one is refused, and nothing else ever happens."""

import struct
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.contract.codec import from_plain, to_plain
from cluster.contract.errors import DocumentError
from cluster.speculation.messages import (
    BlockTableSizes,
    Message,
    MessageCodec,
    MessageError,
    NoProposal,
    NoProposalReason,
    ProposeReply,
    ProposeRequest,
    RoundSizes,
    max_reply_bytes,
    max_request_bytes,
)

SIZES = RoundSizes(
    max_num_reqs=6,
    max_num_batched_tokens=40,
    max_model_len=64,
    num_speculative_tokens=3,
    num_prefill_lookahead=2,
    hidden_size=5,
    hidden_dtype="float32",
    vocab_size=100,
    block_tables=(
        BlockTableSizes(width=4, block_size=16, num_blocks=30),
        BlockTableSizes(width=9, block_size=8, num_blocks=20),
    ),
    with_input_ids=True,
)
DIGEST = "0123456789abcdef" * 4


def request_of(sizes: RoundSizes, lengths: list[int], seed: int = 0) -> ProposeRequest:
    """A round with rows of these lengths, and random numbers within their ranges."""
    random = np.random.default_rng(seed)
    B, T, slots, K = len(lengths), sum(lengths), sizes.max_num_reqs, sizes.num_speculative_tokens

    def integers(shape: tuple[int, ...], below: int, dtype: str) -> np.ndarray:
        return random.integers(0, below, shape).astype(dtype)

    def floats(width: int) -> np.ndarray:
        values = random.standard_normal((T, width), dtype=np.float32)
        if sizes.hidden_dtype == "float32":
            return values
        return (values * 100).astype(np.float16 if sizes.hidden_dtype == "float16" else np.uint16)

    scheduled = np.array(lengths, np.int32)
    return ProposeRequest(
        epoch=7,
        step=2**40,
        num_speculative_tokens=K,
        decode_graph_eligible=seed % 2 == 1,
        hidden_states=floats(sizes.hidden_size),
        positions=integers((T,), sizes.max_model_len, "i8"),
        query_start_loc=np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32),
        idx_mapping=random.permutation(slots)[:B].astype(np.int64),
        num_scheduled_tokens=scheduled,
        seq_lens_cpu_upper_bound=integers((B,), sizes.max_model_len, "i4"),
        num_sampled=integers((B,), K + 2, "i4"),
        num_rejected=np.minimum(integers((B,), K + 1, "i4"), scheduled - 1),
        last_sampled=integers((slots, 1), sizes.vocab_size, "i8"),
        next_prefill_tokens=integers((sizes.num_prefill_lookahead, slots), sizes.vocab_size, "i4"),
        temperature=random.random(slots, dtype=np.float32),
        seeds=random.integers(-(2**63), 2**63 - 1, slots),
        block_tables=tuple(integers((B, table.width), table.num_blocks, "i4") for table in sizes.block_tables),
        input_ids=integers((T,), sizes.vocab_size, "i4") if sizes.with_input_ids else None,
        kv_rows=tuple(map(floats, sizes.kv_row_sizes)),
    )


def reply_of(sizes: RoundSizes, num_reqs: int, num_speculative_tokens: int, seed: int = 0) -> ProposeReply:
    random = np.random.default_rng(seed)
    shape = (num_reqs, num_speculative_tokens)
    return ProposeReply(
        epoch=7,
        step=9,
        draft_token_ids=random.integers(0, sizes.vocab_size, shape),
        draft_time_us=1234,
    )


def encoded(codec: MessageCodec, message: Message) -> bytearray:
    buffer = bytearray(codec.max_encoded_bytes)
    return bytearray(codec.encoder(memoryview(buffer)).encode(message))


def assert_same(one: object, other: object) -> None:
    assert type(one) is type(other)
    for field in fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        for a, b in pairs:
            np.testing.assert_array_equal(a, b, field.name)
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None), field.name


row_lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6).filter(lambda lengths: sum(lengths) <= 40)


@settings(max_examples=50, deadline=None)
@given(
    row_lengths,
    st.integers(0, 1000),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([(), (12,), (12, 5)]),
)
def test_a_request_arrives_as_it_was_sent(
    lengths: list[int], seed: int, dtype: str, with_input_ids: bool, num_tables: int, rows: tuple[int, ...]
) -> None:
    tables = SIZES.block_tables[:num_tables]
    sizes = replace(SIZES, hidden_dtype=dtype, with_input_ids=with_input_ids, block_tables=tables, kv_row_sizes=rows)
    codec = MessageCodec(sizes, DIGEST)
    request = request_of(sizes, lengths, seed)
    assert_same(codec.decode(memoryview(encoded(codec, request))), request)


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 3])
def test_a_reply_arrives_as_it_was_sent(num_speculative_tokens: int) -> None:
    codec = MessageCodec(SIZES, DIGEST)
    reply = reply_of(codec.sizes, 6, num_speculative_tokens)
    assert_same(codec.decode(memoryview(encoded(codec, reply))), reply)


@pytest.mark.parametrize("reason", NoProposalReason)
def test_a_refusal_arrives_with_its_reason(reason: NoProposalReason) -> None:
    codec = MessageCodec(SIZES, DIGEST)
    refusal = NoProposal(epoch=1, step=2, reason=reason)
    assert codec.decode(memoryview(encoded(codec, refusal))) == refusal


def test_the_largest_messages_fill_the_largest_buffers_and_no_more() -> None:
    codec = MessageCodec(SIZES, DIGEST)
    assert len(encoded(codec, request_of(SIZES, [10, 10, 10, 8, 1, 1]))) == max_request_bytes(SIZES)
    assert len(encoded(codec, reply_of(SIZES, 6, 3))) == max_reply_bytes(SIZES)
    assert codec.max_encoded_bytes == max(max_request_bytes(SIZES), max_reply_bytes(SIZES))


def test_decoded_tensors_are_aligned_views_of_the_received_bytes() -> None:
    codec = MessageCodec(SIZES, DIGEST)
    raw = encoded(codec, request_of(SIZES, [4, 1]))
    aligned = np.zeros(len(raw) + 64, np.uint8)
    start = -aligned.ctypes.data % 64
    received = memoryview(aligned)[start : start + len(raw)]
    received[:] = raw
    request = codec.decode(received)
    for array in (request.hidden_states, request.positions, request.input_ids, *request.block_tables):
        assert array.ctypes.data % 64 == 0
        assert array.flags.writeable
        assert np.shares_memory(array, aligned)


def test_the_wire_is_little_endian_and_stays_as_it_is() -> None:
    codec = MessageCodec(SIZES, DIGEST)
    raw = encoded(
        codec,
        ProposeReply(epoch=3, step=4, draft_token_ids=np.array([[1, 2]]), draft_time_us=5),
    )
    assert raw[:32] == b"DSPK" + struct.pack("<HHQQQ", 1, 2, 144, 3, 4)
    assert raw[32:48] == bytes.fromhex(DIGEST)[:16]
    assert raw[48:64] == codec.sizes.digest[:16]
    assert raw[64:128] == struct.pack("<IIIIQ40x", 1, 0, 2, 0, 5)
    assert raw[128:] == struct.pack("<qq", 1, 2)


def test_sides_that_disagree_on_contract_or_sizes_answer_wrong_digest() -> None:
    raw = memoryview(encoded(MessageCodec(SIZES, DIGEST), request_of(SIZES, [1])))
    for other in (MessageCodec(SIZES, DIGEST[::-1]), MessageCodec(replace(SIZES, max_model_len=63), DIGEST)):
        with pytest.raises(MessageError, match="this side holds") as caught:
            other.decode(raw)
        assert caught.value.reason is NoProposalReason.WRONG_DIGEST
        assert (caught.value.epoch, caught.value.step) == (7, 2**40)


def test_a_refused_request_can_be_answered_by_its_epoch_and_step() -> None:
    codec = MessageCodec(SIZES, DIGEST)
    request = request_of(SIZES, [2])
    request.positions[0] = -1
    with pytest.raises(MessageError) as caught:
        codec.decode(memoryview(encoded(codec, request)))
    assert caught.value.reason is NoProposalReason.DECODE_ERROR
    assert (caught.value.epoch, caught.value.step) == (7, 2**40)


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("query_start_loc", 0, 1, "query_start_loc goes from 1 to 7"),
        ("query_start_loc", 1, -1, "query_start_loc has -1, it must be at least 0 and below 8"),
        ("query_start_loc", 1, 6, "request 1 has 0 tokens"),
        ("query_start_loc", 2, 8, "query_start_loc has 8"),
        ("idx_mapping", 0, 6, "idx_mapping has 6, it must be at least 0 and below 6"),
        ("idx_mapping", 2, -(2**63), "idx_mapping has -9223372036854775808"),
        ("positions", 3, 64, "positions has 64"),
        ("num_scheduled_tokens", 0, 1, "request 0 has 4 tokens, of 1 that were scheduled"),
        ("num_scheduled_tokens", 0, 41, "num_scheduled_tokens has 41"),
        ("seq_lens_cpu_upper_bound", 0, 2**31 - 1, "seq_lens_cpu_upper_bound has 2147483647"),
        ("num_sampled", 0, 5, "num_sampled has 5"),
        ("num_rejected", 0, 4, "num_rejected has 4"),
        ("num_rejected", 1, 2, "request 1 has 2 tokens and 2 rejected"),
        ("last_sampled", (0, 0), 100, "last_sampled has 100"),
        ("next_prefill_tokens", (1, 2), -1, "next_prefill_tokens has -1"),
        ("input_ids", 0, 100, "input_ids has 100"),
    ],
)
def test_a_number_that_would_index_out_of_range_is_refused(field: str, index: object, value: int, message: str) -> None:
    codec = MessageCodec(SIZES, DIGEST)
    request = request_of(SIZES, [4, 2, 1])
    getattr(request, field)[index] = value
    with pytest.raises(MessageError, match=message):
        codec.decode(memoryview(encoded(codec, request)))


@pytest.mark.parametrize(("table", "value"), [(0, 30), (0, -1), (1, 20), (1, -(2**31))])
def test_a_block_id_outside_the_pool_is_refused(table: int, value: int) -> None:
    codec = MessageCodec(SIZES, DIGEST)
    request = request_of(SIZES, [1, 1])
    request.block_tables[table][1, 2] = value
    with pytest.raises(MessageError, match=rf"block_tables\[{table}\] has {value}"):
        codec.decode(memoryview(encoded(codec, request)))


@pytest.mark.parametrize("num_reqs", [1, 4, 300])
@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_an_awaited_reply_is_known_at_once_and_nothing_else_is_taken_for_it(
    num_reqs: int, num_speculative_tokens: int
) -> None:
    sizes = replace(SIZES, max_num_reqs=512, max_num_batched_tokens=2048)
    codec = MessageCodec(sizes, DIGEST)
    request = request_of(sizes, [2] * num_reqs)
    request.num_speculative_tokens = num_speculative_tokens
    request.step = 9
    buffer = memoryview(bytearray(codec.max_encoded_bytes))

    def read(message: Message, sender: MessageCodec = codec) -> ProposeReply | None:
        """It is awaited before it comes."""
        awaited = codec.awaited_reply(request, buffer)
        raw = encoded(sender, message)
        buffer[: len(raw)] = raw
        return awaited.read(len(raw))

    reply = reply_of(sizes, num_reqs, num_speculative_tokens)
    longer = reply_of(sizes, num_reqs + 1, num_speculative_tokens)
    assert_same(read(reply), reply)
    refusal = NoProposal(epoch=7, step=9, reason=NoProposalReason.STALE_EPOCH)
    for other in [replace(reply, step=8), replace(reply, epoch=6), refusal, request, longer]:
        assert read(other) is None
    assert read(reply, MessageCodec(sizes, DIGEST[::-1])) is None
    awaited = codec.awaited_reply(request, buffer)
    assert awaited.has_its_shape(reply)
    assert not awaited.has_its_shape(longer)
    if num_speculative_tokens:
        for value in (-1, sizes.vocab_size):
            reply.draft_token_ids[-1, -1] = value
            assert read(reply) is None


@pytest.mark.parametrize("value", [-1, 100, 2**62])
def test_a_drafted_token_outside_the_vocabulary_is_refused(value: int) -> None:
    codec = MessageCodec(SIZES, DIGEST)
    reply = reply_of(SIZES, 2, 3)
    reply.draft_token_ids[1, 2] = value
    with pytest.raises(MessageError, match=f"draft_token_ids has {value}"):
        codec.decode(memoryview(encoded(codec, reply)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_speculative_tokens": 4}, "the round wants 4 speculative tokens, the pair was set up for 3"),
        ({"hidden_states": np.zeros((3, 5))}, r"hidden_states is float64\[3, 5\], the round sizes make it float32"),
        ({"hidden_states": np.zeros((3, 4), np.float32)}, r"hidden_states is float32\[3, 4\]"),
        ({"input_ids": None}, "the message has 14 tensors, the round sizes say hidden_states, positions"),
        ({"block_tables": ()}, "the message has 13 tensors"),
        ({"positions": np.zeros(41, np.int64)}, "the round has 41 tokens, it can have 2 to 40"),
        ({"idx_mapping": np.zeros(7, np.int64)}, "the round has 7 requests, it can have 1 to 6"),
        ({"epoch": -1}, "has a number that its field can't hold"),
    ],
)
def test_a_message_that_the_sizes_have_no_room_for_is_not_sent(change: dict[str, object], message: str) -> None:
    codec = MessageCodec(SIZES, DIGEST)
    with pytest.raises(MessageError, match=message):
        encoded(codec, replace(request_of(SIZES, [2, 1]), **change))


def test_a_buffer_that_is_too_small_is_refused() -> None:
    codec = MessageCodec(SIZES, DIGEST)
    with pytest.raises(MessageError, match="the buffer 100"):
        codec.encoder(memoryview(bytearray(100))).encode(request_of(SIZES, [1]))


def decode_or_refuse(codec: MessageCodec, raw: bytes | bytearray) -> None:
    """What any bytes must come to: a message of this pair, or a MessageError."""
    try:
        message = codec.decode(memoryview(raw))
    except MessageError:
        return
    sizes = codec.sizes
    if isinstance(message, ProposeRequest):
        assert 1 <= message.num_reqs <= sizes.max_num_reqs
        assert message.idx_mapping.max() < sizes.max_num_reqs
        assert (np.diff(message.query_start_loc) > message.num_rejected).all()
        assert message.query_start_loc[-1] == message.num_tokens <= sizes.max_num_batched_tokens
        for table, limits in zip(message.block_tables, sizes.block_tables, strict=True):
            assert table.min() >= 0
            assert table.max() < limits.num_blocks
            assert message.positions.min() >= 0
            assert message.positions.max() // limits.block_size < table.shape[1]


CODEC = MessageCodec(SIZES, DIGEST)
VALID = [
    bytes(encoded(CODEC, message))
    for message in (
        request_of(SIZES, [4, 2, 1]),
        reply_of(SIZES, 2, 3),
        NoProposal(epoch=1, step=2, reason=NoProposalReason.STALE_EPOCH),
    )
]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 128), st.sampled_from(VALID))
def test_random_bytes_are_refused_or_harmless(raw: bytes, kept: int, valid: bytes) -> None:
    decode_or_refuse(CODEC, raw)
    decode_or_refuse(CODEC, valid[:kept] + raw)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(VALID))
def test_cut_and_lengthened_messages_are_refused(data: st.DataObject, valid: bytes) -> None:
    raw = valid[: data.draw(st.integers(0, len(valid) - 1))]
    for foreign in (raw, valid + raw):
        if len(foreign) != len(valid):
            with pytest.raises(MessageError):
                CODEC.decode(memoryview(foreign))


@settings(max_examples=500, deadline=None)
@given(st.data(), st.sampled_from(VALID))
def test_flipped_bits_are_refused_or_harmless(data: st.DataObject, valid: bytes) -> None:
    raw = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 3))):
        bit = data.draw(st.integers(0, 8 * len(raw) - 1))
        raw[bit // 8] ^= 1 << bit % 8
    decode_or_refuse(CODEC, raw)


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(*[st.one_of(st.integers(0, 8), st.integers(0, 2**32 - 1))] * 4),
    st.integers(0, 2**64 - 1),
    st.sampled_from(VALID),
)
def test_headers_with_any_counts_allocate_nothing(counts: tuple[int, ...], num_bytes: int, valid: bytes) -> None:
    raw = bytearray(valid)
    struct.pack_into("<4I", raw, 64, *counts)
    decode_or_refuse(CODEC, raw)
    struct.pack_into("<Q", raw, 8, num_bytes)
    decode_or_refuse(CODEC, raw)


def test_round_sizes_travel_as_a_document_and_are_checked() -> None:
    assert from_plain(RoundSizes, to_plain(SIZES)) == SIZES
    for change, path in (
        ({"max_num_reqs": 0}, "max_num_reqs"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"hidden_dtype": "float64"}, "hidden_dtype"),
        ({"max_model_len": 65}, r"block_tables\[0\].width"),
    ):
        with pytest.raises(DocumentError, match=path):
            from_plain(RoundSizes, {**to_plain(SIZES), **change})


def test_every_number_in_the_sizes_changes_their_digest() -> None:
    digests = {SIZES.digest}
    for name in (field.name for field in fields(SIZES)):
        value = getattr(SIZES, name)
        if type(value) is int:
            digests.add(replace(SIZES, **{name: value - 1}).digest)
    assert len(digests) == 8
