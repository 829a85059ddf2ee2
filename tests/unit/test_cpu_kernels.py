"""The stand-in kernels give what vLLM's own kernels give under Triton's interpreter, or what float64 says."""

import numpy as np
import pytest
import torch

from cluster.engine.cpu import profile

if not profile.is_cpu_installation():
    pytest.skip("the stand-in kernels belong to the CPU installation", allow_module_level=True)

from triton import language as tl
from triton.runtime.interpreter import TensorHandle
from vllm.triton_utils import dispatcher

profile.install()

from vllm.v1.worker.gpu import structured_outputs  # noqa: E402
from vllm.v1.worker.gpu.sample import gumbel, logprob, min_p, penalties  # noqa: E402
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as rejection  # noqa: E402

from cluster.engine.cpu.kernels import noise, registry  # noqa: E402

V, R, K = 1100, 6, 3


@pytest.fixture
def interpreted(monkeypatch):
    """Put vLLM's own kernels back for the calls inside; `interpreted(function, ...)` runs `function` with them."""

    def run(function, *arguments, **keywords):
        with monkeypatch.context() as patch:
            patch.setattr(rejection.tldevice, "log1p", _log1p)
            for name in registry.STAND_INS:
                module, attribute = dispatcher._resolve_kernel(name)
                patch.setattr(module, attribute, dispatcher._registry[name][0])
            return function(*arguments, **keywords)

    return run


def _log1p(x):
    """What the interpreter lacks of libdevice: without it vLLM's kernel fails for probabilistic drafts."""
    return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


def _state(generator, rows):
    """Rows of logits, their request slots, and per slot a temperature (greedy, 1 and others), seed; positions."""
    return {
        "logits": torch.randn(rows, V, generator=generator) * 3,
        "slots": torch.randint(0, R, (rows,), generator=generator, dtype=torch.int32),
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.3, 0.0, 2.0]),
        "seeds": torch.randint(-(2**62), 2**62, (R,), generator=generator),
        "positions": torch.randint(0, 2**20, (rows,), generator=generator),
    }


@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("is_drafting", [False, True])
def test_gumbel_sampling_draws_the_tokens_of_the_interpreted_kernel(interpreted, generator, is_drafting, use_fp64):
    state = _state(generator, rows=12)
    state["slots"][3] = -1  # a row of padding

    def sample():
        cache = torch.zeros(R, K, V)
        tokens = gumbel.gumbel_sample(
            state["logits"],
            state["slots"],
            state["temperature"],
            state["seeds"],
            state["positions"],
            apply_temperature=True,
            is_drafting=is_drafting,
            logits_cache=cache,
            logits_cache_col=torch.tensor(1),
            use_fp64=use_fp64,
        )
        return tokens, cache

    expected_tokens, expected_cache = interpreted(sample)
    tokens, cache = sample()
    assert tokens.tolist() == expected_tokens.tolist()
    # Several rows of one request write the same place; which comes last is no part of the contract.
    once = [slot for slot in range(R) if int((state["slots"] == slot).sum()) == 1]
    assert torch.equal(cache[once], expected_cache[once])


def test_noise_follows_the_gumbel_distribution():
    draws = np.concatenate([noise.gumbel_float32(seed, 5, 20_000) for seed in range(10)])
    assert np.isfinite(draws).all()
    assert abs(draws.mean() - np.euler_gamma) < 0.01
    assert abs(draws.std() - np.pi / np.sqrt(6)) < 0.01


def test_temperature_and_min_p_are_those_of_the_interpreted_kernels(interpreted, generator):
    state = _state(generator, rows=9)
    shares = torch.tensor([0.0, 0.1, 0.5, 0.0, 0.01, 1.0])

    def process():
        logits = state["logits"].clone()
        gumbel.apply_temperature(logits, state["slots"], state["temperature"])
        min_p.apply_min_p(logits, state["slots"], shares)
        return logits

    assert torch.equal(process(), interpreted(process))


def test_penalties_count_prompt_output_and_earlier_drafts_as_the_interpreted_kernel_does(interpreted, generator):
    rows = 8
    state = _state(generator, rows)
    # Two requests of four rows each: the last output token and three drafts.
    slots = torch.tensor([1] * 4 + [4] * 4, dtype=torch.int32)
    tokens = torch.randint(0, V, (rows,), generator=generator, dtype=torch.int32)
    tokens[2] = tokens[1]
    tokens[3] = tokens[6] = -1  # drafts that a grammar has refused
    prompt_bits = torch.randint(-(2**31), 2**31, (R, (V + 31) // 32), generator=generator, dtype=torch.int32)
    counts = torch.randint(0, 3, (R, V), generator=generator, dtype=torch.int32)

    def process():
        logits = state["logits"].clone()
        penalties.apply_penalties(
            logits,
            slots,
            tokens,
            torch.tensor([0, 1, 2, 3] * 2, dtype=torch.int32),
            torch.tensor([1.0, 1.3, 1.0, 1.0, 0.8, 1.0]),
            torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
            torch.tensor([0.0, 0.2, 0.0, 0.0, -0.3, 0.0]),
            prompt_bits,
            counts,
        )
        return logits

    torch.testing.assert_close(process(), interpreted(process), rtol=1e-6, atol=1e-6)


def test_logprobs_and_ranks_are_those_of_the_interpreted_kernels(interpreted, generator):
    logits = torch.randn(4, V, generator=generator)
    sampled = torch.randint(0, V, (4,), generator=generator)

    def score():
        return logprob.compute_topk_scores(logits, 5, sampled)

    expected, found = interpreted(score), score()
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        found.logprobs, logits.double().log_softmax(1).gather(1, found.logprob_token_ids).float()
    )
    assert found.selected_token_ranks.tolist() == expected.selected_token_ranks.tolist()


def test_a_grammar_masks_the_tokens_that_the_interpreted_kernel_masks(interpreted, generator):
    # Two requests with three and two rows; the last mask is for a position that its request doesn't have.
    bitmask = torch.randint(-(2**31), 2**31, (4, (V + 31) // 32), generator=generator, dtype=torch.int32)
    indices = torch.tensor([0, 2, 4, 7], dtype=torch.int32)

    def process():
        logits = torch.randn(5, V, generator=torch.Generator().manual_seed(1))
        structured_outputs._apply_grammar_bitmask_kernel[(4, 1)](
            logits,
            logits.stride(0),
            indices,
            torch.tensor([0, 3, 5], dtype=torch.int32),
            bitmask,
            bitmask.stride(0),
            V,
            MASK_STRIDE=4,
            BLOCK_SIZE=2048,
        )
        return logits

    masked = process()
    assert torch.equal(masked, interpreted(process))
    assert torch.isinf(masked).any(dim=1).tolist() == [True, False, True, True, False]


class Round:
    """One round of verification: requests with 0 to K drafts each, of which some agree with the target."""

    def __init__(self, generator, *, temperatures, probabilistic):
        counts = [index % (K + 1) for index in range(len(temperatures))]
        self.cu_num_logits = torch.tensor([0, *np.cumsum([count + 1 for count in counts])], dtype=torch.int32)
        rows = int(self.cu_num_logits[-1])
        self.idx_mapping = torch.randperm(len(temperatures), generator=generator).int()
        self.expanded = torch.repeat_interleave(self.idx_mapping, torch.tensor(counts) + 1)
        self.local_pos = torch.cat([torch.arange(count + 1) for count in counts]).int()
        self.temperature = torch.tensor(temperatures)[self.idx_mapping.argsort()]
        self.target_logits = torch.randn(rows, V, generator=generator) * 3
        self.draft_logits = torch.randn(len(temperatures), K, V, generator=generator) * 3 if probabilistic else None
        self.drafts = self.target_logits.argmax(dim=1).roll(1)
        wrong = torch.rand(rows, generator=generator) < 0.3
        self.drafts[wrong] = torch.randint(0, V, (int(wrong.sum()),), generator=generator)
        self.drafts[torch.rand(rows, generator=generator) < 0.1] = -1
        self.seed = torch.randint(0, 2**40, (len(temperatures),), generator=generator)
        self.pos = torch.randint(0, 2**16, (rows,), generator=generator)

    def verify(self, **keywords):
        scaled = (
            self.target_logits / torch.where(self.temperature == 0, 1.0, self.temperature)[self.expanded.long(), None]
        )
        sampled, num_sampled = rejection.rejection_sample(
            scaled,
            self.draft_logits,
            self.drafts,
            self.cu_num_logits,
            self.pos,
            self.idx_mapping,
            self.expanded,
            self.local_pos,
            self.temperature,
            self.seed,
            K,
            **keywords,
        )
        return [row[:count].tolist() for row, count in zip(sampled, num_sampled.tolist(), strict=True)]


@pytest.mark.parametrize("probabilistic", [False, True], ids=["one-hot drafts", "probabilistic drafts"])
@pytest.mark.parametrize("rule", ["standard", "block", "synthetic"])
def test_verification_is_that_of_the_interpreted_kernels(interpreted, rule, probabilistic):
    rules = {
        "standard": {},
        "block": {"use_block_verification": True},
        "synthetic": {"synthetic_conditional_rates": torch.tensor([0.9, 0.6, 0.4])},
    }
    lengths = set()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        round_ = Round(generator, temperatures=[0.0, 1.0, 0.7, 0.0, 1.3, 1.0, 0.0, 0.5], probabilistic=probabilistic)
        tokens = round_.verify(**rules[rule])
        assert tokens == interpreted(round_.verify, **rules[rule])
        lengths |= {len(row) for row in tokens}
    assert lengths >= {1, 2}


def test_greedy_verification_accepts_exactly_the_drafts_that_the_target_would_have_chosen():
    round_ = Round(torch.Generator().manual_seed(1), temperatures=[0.0] * 8, probabilistic=True)
    choices = round_.target_logits.double().argmax(dim=1).tolist()
    for index, tokens in enumerate(round_.verify()):
        start, end = round_.cu_num_logits[index : index + 2].tolist()
        drafts = round_.drafts[start + 1 : end].tolist()
        agreed = next((i for i, draft in enumerate(drafts) if draft != choices[start + i]), len(drafts))
        assert tokens == choices[start : start + agreed + 1]


def _emitted(*, draft_logits, target_logits, draws, **keywords):
    """The first token of each of many independent rounds over one pair of distributions, with one draft each."""
    generator = torch.Generator().manual_seed(3)
    size = target_logits.shape[1]
    logits = target_logits.repeat(draws, 1)
    if draft_logits is None:
        drafts = torch.zeros(2 * draws, dtype=torch.int64)  # the draft always proposes token 0
    else:
        drafts = torch.zeros(2 * draws, dtype=torch.int64)
        drafts[1::2] = torch.multinomial(draft_logits.softmax(-1)[0], draws, True, generator=generator)
        draft_logits = draft_logits.expand(draws, 1, size).contiguous()
    slots = torch.arange(draws, dtype=torch.int32)
    sampled, _ = rejection.rejection_sample(
        logits,
        draft_logits,
        drafts,
        torch.arange(0, 2 * draws + 1, 2, dtype=torch.int32),
        torch.arange(2 * draws),
        slots,
        slots.repeat_interleave(2),
        torch.tensor([0, 1], dtype=torch.int32).repeat(draws),
        torch.ones(draws),
        torch.randint(0, 2**40, (draws,), generator=generator),
        1,
        **keywords,
    )
    return np.bincount(sampled[:, 0].numpy(), minlength=size)


@pytest.mark.parametrize("probabilistic", [False, True], ids=["one-hot draft", "probabilistic draft"])
@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
def test_verification_leaves_the_target_distribution_as_it_is(probabilistic, block):
    draws = 4_000
    target = torch.tensor([[1.0, 0.5, 0.0, -0.5, -1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    draft = torch.tensor([[-1.0, 1.5, 0.5, 0.0, -2.0]]) if probabilistic else None
    counts = _emitted(draft_logits=draft, target_logits=target, draws=draws, use_block_verification=block)
    expected = target[0].double().softmax(-1).numpy() * draws
    # Chi-square with four degrees of freedom: 18.5 is passed by chance once in a thousand; the seed is fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 18.5


def test_a_placeholder_draft_ends_a_sampled_request_with_the_targets_own_token():
    target = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    slots = torch.zeros(2, dtype=torch.int32)
    sampled, num_sampled = rejection.rejection_sample(
        target, None, torch.tensor([0, -1]), torch.tensor([0, 2], dtype=torch.int32), torch.arange(2), slots[:1],
        slots, torch.tensor([0, 1], dtype=torch.int32), torch.ones(1), torch.tensor([5]), 1,
    )  # fmt: skip
    assert num_sampled.tolist() == [1]
    assert 0 <= int(sampled[0, 0]) < 3


def test_a_stand_in_for_another_kernel_signature_is_refused():
    def wrong(logits, no_such_parameter):
        pass

    with pytest.raises(TypeError, match=r"no_such_parameter.*vLLM 0\.32\.0"):
        registry.by_parameter_name(f"{registry._SAMPLE}.gumbel._gumbel_sample_kernel", wrong)
