"""From the config of a cluster to the settings of an engine on this host."""

from dataclasses import asdict

from cluster.config import ClusterConfig
from cluster.engine.settings import EngineSettings
from cluster.models.draft import plan_speculation
from cluster.models.folder import open_model


def engine_settings(config: ClusterConfig) -> EngineSettings:
    """Find the models here and check that they are a pair. Raises UserError where one is absent, or they aren't."""
    target, speculation = open_model(config.model.target, role="target"), None
    if config.model.draft is not None:
        draft = open_model(config.model.draft, role="draft")
        speculation = plan_speculation(target, draft, config.model.num_speculative_tokens)
    return EngineSettings(target=target, speculation=speculation, **asdict(config.engine))
