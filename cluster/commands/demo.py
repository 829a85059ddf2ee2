"""`dspark-cluster demo`: a small real model answers on any machine, with speculative decoding."""

from cluster.cache import cache_dir
from cluster.commands.generate import GenerateOptions, generate
from cluster.commands.terminal import messages
from cluster.engine.settings import EngineSettings
from cluster.models.demo_target import NAME, demo_target
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model
from cluster.models.truncated import truncated_draft

# 24 of the 30 layers agree with the whole model on about two tokens in five.
_DRAFT_LAYERS = 24
_TOKENS_A_ROUND = 3
_MAX_MODEL_LEN = 1024


def demo(prompt: str, *, json_output: bool) -> None:
    """Make the demo's models where they are absent, then answer the prompt. Raises UserError if that can't be."""
    with messages.status("looking for the demo's models") as status:
        path = demo_target(progress=status.update)
        target = open_model(str(path), role="target")
        name = f"{NAME}-first-{_DRAFT_LAYERS}-layers"
        status.update(f"making its draft, {name}")
        draft = open_model(str(truncated_draft(target, _DRAFT_LAYERS, cache_dir() / "models" / name)), role="draft")
    messages.print(
        f"target {NAME}, draft its first {_DRAFT_LAYERS} layers (exact, but too large to be faster)\n> {prompt}",
        style="dim",
        soft_wrap=True,
    )
    settings = EngineSettings(
        target=target,
        speculation=plan_speculation(target, draft, _TOKENS_A_ROUND),
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=1,
    )
    generate(settings, GenerateOptions(prompt=prompt, json_output=json_output))
