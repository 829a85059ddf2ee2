"""`dspark-cluster demo`: a cluster of a small real model and its trained draft on any machine, from `up` to `down`."""

import json
from dataclasses import replace
from typing import Final

import ray

from actors.answers import answer_of
from actors.commands.borrow import gateway
from actors.names import member_name
from actors.session import session
from cluster.commands.generate import GenerateOptions
from cluster.commands.generate_remote import RemoteOptions, answer_remote
from cluster.commands.terminal import messages
from cluster.config import ChannelConfig, ClusterConfig, GatewayConfig, ModelConfig, RayConfig
from cluster.engine.settings import EngineOptions
from cluster.models.demo_draft import demo_draft_dir
from cluster.models.demo_target import NAME, demo_target
from cluster.speculation.rounds import RoundReport, RoundTimes

_NAMESPACE: Final = "dspark-cluster-demo"
_TARGET: Final = member_name("target", 0)


def demo(prompt: str, *, json_output: bool) -> None:
    """Make the demo's target where it is absent, start a cluster, and have the prompt answered over gRPC, with drafts
    and without. Raises UserError if that can't be.

    With `json_output` the object is that of `generate`, and `without_drafts` in it the other answer's.
    """
    with messages.status("looking for the demo's target") as status:
        target = demo_target(progress=status.update)
    messages.print(f"target {NAME}, with its DSpark draft in a process of its own", style="dim", soft_wrap=True)
    config = ClusterConfig(
        model=ModelConfig(target=str(target), draft=str(demo_draft_dir())),
        engine=EngineOptions(max_model_len=1024, max_num_seqs=1),
        # A machine's first run is full of hiccups, and it is the draft that is shown.
        channel=ChannelConfig(stall_limit_s=None, rest_slow_drafts=False),
        gateway=GatewayConfig(port=0),
        ray=RayConfig(namespace=_NAMESPACE),
    )
    options = GenerateOptions(prompt=prompt, json_output=json_output)
    with gateway(None, _NAMESPACE, RemoteOptions(address=""), config=config) as remote, session(None, _NAMESPACE):
        messages.print(f"> {prompt}", style="dim", soft_wrap=True, markup=False)
        before = _times()
        drafted = answer_remote(remote, options, stream=not json_output)
        drafted = replace(drafted, rounds=_times().since(before))
        # The same cluster, whose draft takes each round in nevertheless: not quite the target's speed alone.
        plain = answer_remote(remote, options, stream=False, speculate=False)
        if json_output:
            print(json.dumps(drafted.to_json() | {"without_drafts": plain.to_json()}))
            return
        same = "the same tokens" if plain.token_ids == drafted.token_ids else "OTHER TOKENS"
        messages.print(drafted.summary(), style="dim", soft_wrap=True)
        speed = f"{len(plain.token_ids)} tokens in {plain.seconds:.1f} s, {plain.tokens_per_second:.1f} tokens/s"
        messages.print(
            f"without drafts: {speed}, {same}; the draft still takes in each round", style="dim", soft_wrap=True
        )


def _times() -> RoundTimes:
    """Of all rounds of the one target so far."""
    report: RoundReport | None = answer_of(_TARGET, ray.get_actor(_TARGET).round_report.remote())
    assert report is not None  # it has a draft worker
    return report.times
