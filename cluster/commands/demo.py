"""`dspark-cluster demo`: a small real model answers on any machine, with and without its trained draft."""

import json
from dataclasses import replace

from cluster.commands.generate import GenerateOptions, answer
from cluster.commands.terminal import messages
from cluster.engine.settings import EngineSettings
from cluster.models.demo_draft import demo_draft_dir
from cluster.models.demo_target import NAME, demo_target
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model

_MAX_MODEL_LEN = 1024


def demo(prompt: str, *, json_output: bool) -> None:
    """Make the demo's target where it is absent, then answer the prompt twice. Raises UserError if that can't be.

    With `json_output` the object is that of `generate`, and `without_draft` in it the other answer's.
    """
    with messages.status("looking for the demo's target") as status:
        target = open_model(str(demo_target(progress=status.update)), role="target")
    messages.print(f"target {NAME}, with its DSpark draft\n> {prompt}", style="dim", soft_wrap=True)
    settings = EngineSettings(
        target=target,
        speculation=plan_speculation(target, open_model(str(demo_draft_dir()), role="draft"), None),
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=1,
    )
    options = GenerateOptions(prompt=prompt, json_output=json_output)
    drafted = answer(settings, options, stream=not json_output)
    plain = answer(replace(settings, speculation=None), options, stream=False)
    if json_output:
        print(json.dumps(drafted.to_json() | {"without_draft": plain.to_json()}))
        return
    same = "the same tokens" if plain.token_ids == drafted.token_ids else "OTHER TOKENS"
    messages.print(f"with the draft: {drafted.summary()}", style="dim", soft_wrap=True)
    messages.print(f"without it: {plain.summary()}, {same}", style="dim", soft_wrap=True)
