"""What is sampled has the target's own distribution, whatever the draft proposes.

DSPARK_TEST_DRAWS=100000 makes it the long test that it is by rights; a run of the suite has time for fewer draws.
"""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from cluster.engine.in_process import GenerationRequest
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from cluster.models.draft import Speculation
from cluster.models.folder import open_model
from tests.checkpoints.memoryless import ALPHABET, next_token_probabilities, write_pair
from tests.split.arms import Arm, remote, separate_of

DRAWS = int(os.environ.get("DSPARK_TEST_DRAWS", "3840"))
TOKENS = 120  # a request's
REQUESTS_AT_ONCE = 16


def test_sampled_tokens_have_the_targets_distribution(start: Callable[..., Any], tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path, seed=0)
    drafted = open_model(str(draft), role="draft")
    settings = EngineSettings(
        target=open_model(str(target), role="target"),
        speculation=Speculation(draft=drafted, method="dspark", num_speculative_tokens=4),
        max_model_len=128,
        max_num_seqs=REQUESTS_AT_ONCE,
        max_num_batched_tokens=128,
        num_gpu_blocks=REQUESTS_AT_ONCE + 1,
    )
    arm = Arm(start(SeparateEngine, settings))
    probabilities = next_token_probabilities()

    counts, rounds = draw(arm, DRAWS, first_seed=0)
    assert remote(arm).lost is None
    assert {*rounds} == {0, 1, 2, 3, 4}
    p_value = chi_square_p_value(counts, probabilities)
    print(f"{int(counts.sum())} draws in {len(rounds)} rounds: p = {p_value:.3f}")
    assert p_value > 0.01
    # It would be seen if a draft were a little more often accepted than the target's probability of it.
    favoured = torch.nn.functional.one_hot(probabilities.argmax(dim=1), len(ALPHABET))
    assert chi_square_p_value(counts, (probabilities + 0.2 * favoured) / 1.2) < 0.001

    # Without a draft nothing is proposed.
    separate_of(arm).stop_draft()
    counts, rounds = draw(arm, DRAWS // 4, first_seed=DRAWS)
    assert not rounds
    p_value = chi_square_p_value(counts, probabilities)
    print(f"{int(counts.sum())} draws without a draft: p = {p_value:.3f}")
    assert p_value > 0.01


def draw(arm: Arm, draws: int, *, first_seed: int) -> tuple[torch.Tensor, list[int]]:
    """How often which token came after which, [A, A], and how many drafts each round accepted."""
    requests = [
        GenerationRequest(
            prompt_token_ids=(ALPHABET[index % len(ALPHABET)],),
            max_tokens=TOKENS,
            temperature=1.0,
            seed=first_seed + index,
            ignore_eos=True,
        )
        for index in range(-(-draws // TOKENS))
    ]
    completions = arm.engine.generate(requests)
    counts = torch.zeros(len(ALPHABET), len(ALPHABET), dtype=torch.float64)
    for request, completion in zip(requests, completions, strict=True):
        for last, token in pairwise((*request.prompt_token_ids, *completion.token_ids)):
            counts[ALPHABET.index(last), ALPHABET.index(token)] += 1
    return counts, [accepted for completion in completions for accepted in completion.accepted_by_round]


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's test of the counted next tokens [A, A], one multinomial for each last token."""
    expected = counts.sum(dim=1, keepdim=True) * probabilities
    statistic = ((counts - expected).square() / expected).sum()
    degrees = torch.tensor(counts.shape[0] * (counts.shape[1] - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))
