"""From the config of a cluster to the settings of an engine on this host."""

from dataclasses import asdict

from cluster.config import ClusterConfig
from cluster.engine.cpu import profile
from cluster.engine.pair import beside_draft
from cluster.engine.settings import EngineSettings
from cluster.errors import UserError
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model


def engine_settings(config: ClusterConfig) -> EngineSettings:
    """Find the models here and check that they are a pair. Raises UserError where one is absent, or they aren't."""
    model, speculation = config.model, None
    weights = model.load_format != "dummy"
    if not weights and model.draft is not None and profile.is_cpu_installation():
        # It repacks a projection's weights, from which a draft without loaded ones makes its own at its first round.
        raise UserError("model.load_format: dummy", "vLLM's CPU build can't draft by it", "leave it out, or the draft")
    target = open_model(model.target, role="target", weights=weights)
    if model.draft is not None:
        draft = open_model(model.draft, role="draft", weights=weights)
        speculation = plan_speculation(target, draft, model.num_speculative_tokens)
    settings = EngineSettings(
        target=target,
        speculation=speculation,
        load_format=model.load_format,
        synthetic_acceptance_length=model.synthetic_acceptance_length,
        **asdict(config.engine),
    )
    shared = config.pools.shared_gpu if config.has_draft_workers else None
    return settings if shared is None else beside_draft(settings, shared)
