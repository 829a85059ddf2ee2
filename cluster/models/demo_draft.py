"""The demo's draft, which comes with this package: a DSpark draft that `train-draft` made for the demo's target."""

from pathlib import Path

from cluster.models.demo_target import NAME as TARGET_NAME

NAME = f"{TARGET_NAME}-DSpark"


def demo_draft_dir() -> Path:
    """Its folder: config.json, model.safetensors (29.5 MB) and README.md, the model card."""
    return Path(__file__).parent / "data" / NAME
