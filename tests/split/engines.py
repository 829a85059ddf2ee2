"""What the processes of these tests run: real vLLM engines, and reports of what they hold."""

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil

from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractError, ContractViolation
from cluster.contract.policy import Policy
from cluster.control.member import Member
from cluster.control.refusals import ControlError
from cluster.control.settings import MemberSettings
from cluster.engine.in_process import GenerationRequest
from cluster.engine.separate import SeparateEngine
from cluster.engine.settings import EngineSettings
from cluster.engine.version import vllm_release
from cluster.errors import UserError
from cluster.speculation.pairing import open_rounds

Report = Callable[[dict[str, Any]], None]


def colocated_engine(arguments: dict[str, Any], report: Report) -> None:
    """The pair in one engine as vLLM runs it, without any contract: the geometry of every layer's tensor."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    report({"tensors": _tensors(engine.vllm_config)})


def contracted_target(arguments: dict[str, Any], report: Report) -> None:
    """The target's engine behind the barrier, with a draft elsewhere: what it allocated, or what kept it from that."""
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    def start() -> tuple[Any, KVContract, Any]:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        return engine, engine.model_executor.driver_worker.worker.contract, engine.vllm_config

    _report_of(start, report)


def contracted_draft(member: dict[str, Any], arguments: dict[str, Any], mutation: bool, report: Report) -> None:
    """The same of a draft, from its hello until it would serve rounds."""
    from cluster.speculation.hosted import HostedSpeculator

    def start() -> tuple[Any, KVContract, Any]:
        if mutation:
            _let_a_constructor_write()
        with Member(MemberSettings(**member), vllm_version=vllm_release()) as one, one.reporting():
            hosted = HostedSpeculator(arguments, one.meet_peer().engine_sizes)
            contract = hosted.allocate(one)
            channel, _ = open_rounds(one, contract, hosted.table_widths, take_kv=hosted.take_kv)
            channel.close()  # no round is asked for
            return hosted, contract, hosted._executor.vllm_config

    _report_of(start, report)


def separate_pair(settings: EngineSettings, policy: Policy, report: Report) -> None:
    """Both processes, as `generate` starts them: why they don't, and which processes are left then."""
    try:
        SeparateEngine(settings, policy=policy)
    except UserError as error:
        left = [process.cmdline() for process in psutil.Process().children(recursive=True)]
        report({"error": str(error), "left": left})


def _report_of(start: Callable[[], tuple[Any, KVContract, Any]], report: Report) -> None:
    """`start` gives an engine, which frees its tensors when it is dropped, its contract and its config."""
    from vllm.v1.worker import utils
    from vllm.v1.worker.gpu import attn_utils

    allocations: list[int] = []
    allocate = utils.allocate_kv_cache

    def counting(config: Any, *rest: Any) -> Any:
        allocations.append(config.num_blocks)
        return allocate(config, *rest)

    attn_utils.allocate_kv_cache = counting
    try:
        _engine, contract, vllm_config = start()
    except (ContractError, ContractViolation, ControlError) as error:
        field = getattr(error, "field", None)
        report({"error": str(error), "field": field, "type": type(error).__name__, "allocations": allocations})
        return
    report({"contract": contract.to_json(), "tensors": _tensors(vllm_config), "allocations": allocations})


def endless_target(settings: EngineSettings, requests: list[GenerationRequest], report: Report) -> None:
    """A target that has rounds with its draft for ever; after the first it reports both processes' ids."""
    engine = SeparateEngine(settings)
    engine.generate(requests)
    processes = {"target": os.getpid(), "draft": engine.draft_process.pid}
    threading.Thread(target=report, args=(processes,), daemon=True).start()
    while True:
        engine.generate(requests)


def tensors_of(report: dict[str, Any]) -> dict[str, Any]:
    """The reported tensors by layer, as `verify_allocation` looks at them."""
    return {
        name: SimpleNamespace(
            dtype=tensor["dtype"],
            shape=tensor["shape"],
            stride=lambda tensor=tensor: tensor["strides"],
            element_size=lambda tensor=tensor: tensor["element_size"],
        )
        for name, tensor in report["tensors"].items()
    }


def _tensors(vllm_config: Any) -> dict[str, Any]:
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: {
            "dtype": str(layer.kv_cache.dtype),
            "shape": list(layer.kv_cache.shape),
            "strides": list(layer.kv_cache.stride()),
            "element_size": layer.kv_cache.element_size(),
        }
        for name, layer in layers.items()
        if hasattr(layer, "kv_cache")
    }


def _let_a_constructor_write() -> None:
    """What vLLM #52288 was: a layer's constructor rewrites the config that it was given."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.models import qwen3_dflash

    class RewritingAttention(qwen3_dflash.Attention):  # type: ignore[name-defined, misc]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            get_current_vllm_config().cache_config.cache_dtype = "fp8"
            super().__init__(*arguments, **keywords)

    qwen3_dflash.Attention = RewritingAttention
