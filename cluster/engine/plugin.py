"""What vLLM runs of ours in every process it starts (entry point group `vllm.general_plugins`)."""

from cluster.engine import draft_context, request_drafts, round_figures, shared_memory
from cluster.engine.cpu import profile
from cluster.engine.parent import follow_parent
from cluster.engine.version import require_supported_vllm
from cluster.speculation import speculator_hook


def register() -> None:
    """Install what this process needs of ours; vLLM may call it more than once in a process.

    Raises:
        UserError: this is another version of vLLM.
    """
    require_supported_vllm()
    follow_parent()
    shared_memory.install()
    # Here, not above: vLLM imports this module while it is itself being imported.
    from vllm.model_executor.models import ModelRegistry

    # By name, so that the model's code is imported only where it is used.
    ModelRegistry.register_model("Gemma4DSparkModel", "cluster.engine.gemma4_dspark:NamedGemma4DSparkForCausalLM")
    profile.install()
    speculator_hook.install()
    round_figures.install()
    request_drafts.install()
    draft_context.install()
