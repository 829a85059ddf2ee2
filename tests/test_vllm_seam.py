"""vLLM's private names that this project relies on, each with what is relied on: another vLLM version fails here first.

Most of it is read off our own code, so that a new import, call or attribute is checked without being listed anywhere.
"""

import ast
import importlib
import importlib.util
import inspect
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import is_typeddict
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

import cluster
from cluster.engine.pair import DEFAULT_SHARE
from cluster.speculation.remote import RemoteSpeculator
from tests import source
from tests.source import Call, Import, attributes_of

ROOT = Path(cluster.__file__).parent.parent
FILES = {
    file.relative_to(ROOT).as_posix(): source.parse(file)
    for folder in ("cluster", "actors")
    for file in sorted((ROOT / folder).rglob("*.py"))
}

# One module a side, and those of the CPU profile. Nobody else may import a private name.
SEAMS = {
    "cluster/speculation/target_seam.py": "the target's side of the split",
    "cluster/speculation/draft_seam.py": "the draft's side of the split",
    "cluster/speculation/device_kernels.py": "kernels of our own, in Triton",
    "cluster/speculation/speculator_hook.py": "where vLLM's runner gets our speculator",
    "cluster/contract/vllm_names.py": "probe and contract",
    "cluster/engine/async_engine.py": "the engine that serves",
    "cluster/engine/request_drafts.py": "a request's own number of drafts",
    "cluster/engine/draft_context.py": "which draft has the context of what a step runs",
    "cluster/engine/target_worker.py": "the worker that asks a draft elsewhere",
    "cluster/engine/round_figures.py": "the figures of a request's rounds",
    "cluster/engine/tracing.py": "ranges of a trace, as vLLM makes its own",
    "cluster/engine/contract_worker.py": "the worker that is held to a contract",
    "cluster/engine/rank_barrier.py": "its barriers across an engine's ranks",
    "cluster/engine/tensor_parallel.py": "an engine of several ranks",
    "cluster/engine/target_layers.py": "the target's layers in the process of a draft that reads their KV",
    "cluster/speculation/target_kv.py": "the target's KV in that process",
    "cluster/engine/gemma4_dspark.py": "a model of vLLM's that needs another name",
    "cluster/engine/cpu/clock.py": "CPU profile: time by kernel",
    "cluster/engine/cpu/interpreter.py": "CPU profile: Triton's interpreter",
    "cluster/engine/cpu/kernels/registry.py": "CPU profile: stand-ins for kernels",
    "cluster/engine/cpu/triton_backend/compiler.py": "CPU profile: the `cpu` entry of Triton's backends",
    "cluster/engine/cpu/triton_backend/driver.py": "CPU profile: the `cpu` entry of Triton's backends",
}

# Modules whose names vLLM documents for its users, and for those who write plugins, platforms and loaders.
PUBLIC = {
    "vllm",
    "vllm.config",
    "vllm.config.cache",
    "vllm.envs",
    "vllm.exceptions",
    "vllm.inputs",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.models",
    "vllm.platforms",
    "vllm.plugins",
    "vllm.sampling_params",
}

# What an object of vLLM's is called in our code, as in vLLM's own, and what it is then.
TYPES: dict[str, type] = {
    "attention_config": AttentionConfig,
    "block_tables": BlockTables,
    "cache_config": CacheConfig,
    "compilation_config": CompilationConfig,
    "draft_model_config": ModelConfig,
    "driver_worker": WorkerWrapperBase,
    "engine_core": InprocClient,
    "executor": UniProcExecutor,
    "input_batch": InputBatch,
    "kv_cache_config": KVCacheConfig,
    "kv_cache_spec": KVCacheSpec,
    "model_config": ModelConfig,
    "model_executor": UniProcExecutor,
    "model_runner": GPUModelRunner,
    "parallel_config": ParallelConfig,
    "runner": GPUModelRunner,
    "scheduler_config": SchedulerConfig,
    "speculative": SpeculativeConfig,
    "speculative_config": SpeculativeConfig,
    "target_model_config": ModelConfig,
    "vllm_config": VllmConfig,
    "vllm_engine": LLMEngine,
    "worker": Worker,
}

# What vLLM's runner asks of its speculator.
READ_BY_RUNNER = {
    "attn_groups": "for attention backends to reorder the batch by: none of ours",
    "capture": "CUDA graphs: none of ours",
    "dcp_size": "how KV is sharded over ranks, when it names its KV-cache specs",
    "draft_attn_layer_names": "layers whose KV cache isn't the target's: none here, so no KV is allocated for them",
    "draft_logits": "None: a draft is a token without probabilities, for the rejection sampler",
    "draft_token_confidence_probs": "adaptive verification, which is refused",
    "enable_adaptive_verification": "False, for the same reason",
    "init_cudagraph_manager": "CUDA graphs: none of ours",
    "load_model": "loads our `fc` through `load_draft_model`",
    "model": "for weights to be reloaded, or let go at shutdown",
    "num_extra_query_per_req": "bounds a dummy run: the class's own value",
    "num_query_per_req": "bounds a dummy run: the class's own value",
    "observe_verification": "adaptive verification, which is refused",
    "prepare_watermarking": "watermarked sampling, which there is none of",
    "propose": "a round",
    "set_attn": "hands the block tables over, before the KV cache is allocated",
    "supports_mm_inputs": "False: no embeddings of other inputs are passed",
}

# Methods of vLLM's and Triton's classes that ours replace: one that is gone there would never be called here.
OVERRIDES = {
    "cluster.contract.build_side.ConstructorsOnly": {
        "download_model": "a probe reads configs only",
        "load_weights": "a probe reads configs only",
        "load_model": "constructors only, on the meta device",
    },
    "cluster.engine.async_engine._KvCacheUsage": {
        "__init__": "no reading yet",
        "log_engine_initialized": "nothing to say then",
        "record": "how much of the KV cache is taken",
    },
    "cluster.engine.contract_worker.ContractWorker": {
        "__init__": "has no contract yet",
        "determine_available_memory": "what the contract's blocks take",
        "get_kv_cache_spec": "reports, and waits for the contract",
        "initialize_from_config": "verifies before and after memory is taken",
        "load_model": "watched",
        "shutdown": "the seal lets vLLM clean up",
    },
    "cluster.engine.cpu.triton_backend.compiler.InterpretedBackend": {
        "add_stages": "never compiles",
        "get_module_map": "never compiles",
        "hash": "never compiles",
        "load_dialects": "never compiles",
        "parse_options": "never compiles",
        "supports_target": "a CPU",
    },
    "cluster.engine.cpu.triton_backend.driver.InterpretedDriver": {
        "get_active_torch_device": "the CPU",
        "get_benchmarker": "for autotuned kernels",
        "get_current_target": "the CPU",
        "is_active": "on a CPU build of torch only",
        "map_python_to_cpp_type": "never compiles",
    },
    "cluster.engine.gemma4_dspark.NamedGemma4DSparkForCausalLM": {"__init__": "names the draft's layers apart"},
    "cluster.engine.target_worker.TargetWorker": {
        "__init__": "joins the coordinator",
        "_maybe_get_memory_pool_context": "a pool that the draft maps lies in shared memory",
        "initialize_from_config": "opens the rounds, once both have allocated",
        "execute_model": "tells the speculator which draft the step asks",
        "sample_tokens": "reports to the scheduler which draft there is",
        "shutdown": "nobody can map the pool any more",
    },
    "cluster.engine.target_worker._Reporting": {
        "__init__": "around an output that isn't there yet",
        "get_output": "with the report",
    },
    "cluster.engine.tensor_parallel.TensorParallelExecutor": {
        "_distributed_args": "where all ranks meet",
        "_init_executor": "starts the other ranks first",
        "check_health": "fails once a rank is lost",
        "collective_rpc": "the other ranks run it, too",
        "register_failure_callback": "for a rank that is lost between two calls",
        "shutdown": "ends the other ranks",
    },
    "cluster.speculation.draft_seam.DraftWorker": {
        "_maybe_get_memory_pool_context": "a pool that is mapped isn't allocated",
        "load_model": "the draft alone, with a stub for its target",
    },
    "cluster.speculation.following.FollowingSpeculator": {
        "load_draft_model": "none",
        "propose": "takes the first rank's drafts",
        "set_attn": "nothing attends",
    },
    "cluster.speculation.remote.RemoteSpeculator": {
        "__init__": "refuses what doesn't cross",
        "load_draft_model": "only `fc`",
        "propose": "a round",
        "set_attn": "keeps the block tables, whose rows travel",
    },
    "cluster.speculation.target_seam.DraftlessSpeculator": {
        "__init__": "no attention groups",
        "capture": "nothing to capture",
        "init_cudagraph_manager": "nothing to capture",
    },
}

# Functions that ours stand in for, or that are given a meaning which a caller's arguments don't show.
SIGNATURES = {
    "vllm.v1.worker.gpu.spec_decode:init_speculator": (
        ("vllm_config", "device", "req_states"),
        "the hook replaces it",
    ),
    "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator.propose": (
        (
            "self",
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "temperature",
            "seeds",
            "dp_sync_state",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "mm_inputs",
            "is_profile",
            "num_speculative_tokens",
        ),
        "the round's message carries these, and the draft's side passes them on by position",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model": (
        ("self", "load_dummy_weights", "args", "model", "kwargs"),
        "`model` is the stub that takes the target's place in the draft's process",
    ),
    "vllm.platforms.cuda:CudaPlatformBase.get_valid_backends": (
        ("cls", "device_capability", "attn_selector_config", "num_heads"),
        "a GPU's other backends, which a CPU's platform isn't asked for",
    ),
    "vllm.triton_utils.dispatcher:KernelOverride._launch": (("self", "args", "kwargs"), "timed by kernel"),
    "triton.runtime.interpreter:InterpretedFunction.run": (("self", "args", "grid", "warmup", "kwargs"), "timed, too"),
    "triton.runtime.interpreter:InterpreterBuilder.create_masked_load": (
        ("self", "ptrs", "mask", "other", "cache_policy", "is_volatile"),
        "repaired: the mask it hands on must be contiguous",
    ),
    "triton.runtime.interpreter:InterpreterBuilder.create_masked_store": (
        ("self", "ptrs", "value", "mask", "cache_policy"),
        "repaired: the mask it hands on must be contiguous",
    ),
    "triton.runtime.interpreter:GridExecutor._init_args_hst": (("self", "args_dev", "kwargs"), "repaired: no copies"),
    "triton.runtime.interpreter:GridExecutor._restore_args_dev": (
        ("self", "args_dev", "args_hst", "kwargs", "kwargs_hst"),
        "repaired: no copies",
    ),
    "triton.runtime.interpreter:_patch_lang": (("fn",), "repaired: once a process"),
    "vllm.v1.attention.selector:_cached_get_attn_backend": (
        ("backend", "attn_selector_config", "num_heads", "_run_kv_cache_dtype"),
        "recorded: what each layer asks for",
    ),
}

# The modules of the speculators that the draft's side hosts, with the batch that they read.
HOSTED = (
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator",
    "vllm.v1.worker.gpu.spec_decode.dspark.speculator",
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator",
    "vllm.v1.worker.gpu.spec_decode.gemma4.speculator",
    "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
)

_PACKAGES = ("vllm", "triton")
_SEAM_MODULES = tuple(file.removesuffix(".py").replace("/", ".") for file in SEAMS)
# Who may hold an object of vLLM's.
_SOURCES = (*_PACKAGES, *_SEAM_MODULES, "cluster.speculation", "cluster.engine.in_process")
HOLDERS = [file for file, tree in FILES.items() if any(source.imports(tree, _SOURCES))]

IMPORTS = sorted({found for tree in FILES.values() for _, found in source.imports(tree, _PACKAGES)}, key=str)


@pytest.mark.parametrize("imported", IMPORTS, ids=str)
def test_what_is_imported_is_there(imported: Import) -> None:
    if imported.name is None:
        assert importlib.util.find_spec(imported.module)  # some change torch when they are imported
    else:
        imported.resolve()


def test_private_names_are_imported_in_the_seams_only() -> None:
    """And every seam has one: else it isn't one any more."""
    importing = {
        file
        for file, tree in FILES.items()
        for _, found in source.imports(tree, _PACKAGES)
        if found.module not in PUBLIC
    }
    assert importing == set(SEAMS)


@pytest.mark.parametrize("file", HOLDERS)
def test_attributes_of_what_is_imported_are_there(file: str) -> None:
    for imported, path in source.chains(FILES[file], dict(source.imports(FILES[file], _PACKAGES))):
        found = imported.resolve()
        for name in path:
            assert hasattr(found, name), f"{imported} has no {'.'.join(path)}"
            found = getattr(found, name)


@pytest.mark.parametrize("file", HOLDERS)
def test_calls_of_what_is_imported_fit_its_signature(file: str) -> None:
    """Names that came through a seam, too."""
    imported = dict(source.imports(FILES[file], (*_PACKAGES, *_SEAM_MODULES)))
    for call in source.calls(FILES[file], imported):
        callee = call.of.resolve()
        for name in call.path:
            callee = getattr(callee, name)
        if is_typeddict(callee):
            assert call.keywords <= set(callee.__annotations__)
        elif callee is not None:  # vLLM's answer for a function of another platform: SIGNATURES has those
            assert_fits(call, inspect.signature(callee))


@pytest.mark.parametrize("file", HOLDERS)
def test_attributes_of_vllms_objects_are_there(file: str) -> None:
    """By their names: whatever is called `vllm_config` is a VllmConfig."""
    ours = {cls.__name__: cls for cls in classes_of(file)}
    for use in source.typed_uses(FILES[file], TYPES, ours):
        absent = f"{use.owner.__name__} has no {use.attribute} (line {use.line})"
        assert use.attribute in attributes_of(use.owner), absent


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_what_we_rely_on(name: str) -> None:
    module, _, qualname = name.partition(":")
    assert source.parameters(module, qualname) == SIGNATURES[name][0]


def test_every_override_overrides_something() -> None:
    """And takes what the method that it replaces is called with."""
    found = {}
    for file in HOLDERS:
        for cls in classes_of(file):
            own = source.methods(FILES[file], cls.__name__)
            inherited = {name: method for name in own if (method := replaced_method(cls, name)) is not None}
            found[f"{cls.__module__}.{cls.__qualname__}"] = set(inherited)
            for name, replaced in inherited.items():
                if name != "__init__":
                    assert_takes_the_same(getattr(cls, name), replaced)
    assert found == {name: set(methods) for name, methods in OVERRIDES.items()}


def replaced_method(cls: type, name: str) -> Any:
    """Theirs, also where a class of ours stands between."""
    theirs = (base for base in cls.__mro__[1:] if base.__module__.partition(".")[0] in _PACKAGES)
    return next((getattr(base, name) for base in theirs if hasattr(base, name)), None)


def test_what_the_runner_reads_of_its_speculator_is_there() -> None:
    runner = ast.parse(inspect.getsource(GPUModelRunner))
    assert source.reads_of(runner, "speculator") == set(READ_BY_RUNNER)
    assert set(READ_BY_RUNNER) <= attributes_of(RemoteSpeculator)
    for method, call in source.method_calls(runner, "speculator"):
        assert_fits(call, inspect.signature(getattr(RemoteSpeculator, method)), bound=False)


@pytest.mark.parametrize("module", HOSTED)
def test_what_a_hosted_speculator_reads_of_its_batch_is_there(module: str) -> None:
    """The draft's side gives it a part of an InputBatch."""
    hosted = importlib.import_module(module)
    given = fields_of_the_batch()
    assert source.reads_of(ast.parse(inspect.getsource(hosted)), "input_batch") <= given
    assert given <= attributes_of(InputBatch)
    (propose,) = {cls.propose for cls in vars(hosted).values() if is_speculator(cls) and cls.__module__ == module}
    for method, call in source.method_calls(FILES["cluster/speculation/hosted.py"], "speculator"):
        assert method == "propose"
        assert_fits(call, inspect.signature(propose), bound=False)


def classes_of(file: str) -> list[type]:
    """The module's own classes that are vLLM's or Triton's, too."""
    module = importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and any(map(is_foreign, value.__mro__))
    ]


def is_foreign(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in _PACKAGES


def is_speculator(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, DraftModelSpeculator)


def fields_of_the_batch() -> set[str]:
    tree = FILES["cluster/speculation/draft_seam.py"]
    (fields,) = (call.keywords for call in source.calls(tree, {"SimpleNamespace": Import("types", "SimpleNamespace")}))
    return set(fields)


def assert_fits(call: Call, signature: inspect.Signature, *, bound: bool = True) -> None:
    """`bound` False: the signature has a `self` that the call doesn't."""
    arguments = [None] * (call.positional + (not bound))
    keywords = dict.fromkeys(call.keywords)
    try:
        if call.is_complete:
            signature.bind(*arguments, **keywords)
        else:
            signature.bind_partial(*arguments, **keywords)
    except TypeError as error:
        pytest.fail(f"line {call.line}: {call.of} {'.'.join(call.path)}{signature}: {error}")


def assert_takes_the_same(ours: Any, replaced: Any) -> None:
    """Parameters of the same names in the same order, or any."""
    if isinstance(ours, property):
        assert isinstance(replaced, property)
        return
    mine = inspect.signature(ours).parameters
    if {parameter.kind for parameter in mine.values()} >= {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
        return
    assert list(mine) == list(inspect.signature(replaced).parameters), ours


def test_an_engines_share_of_a_gpu_is_vllms() -> None:
    assert CacheConfig().gpu_memory_utilization == DEFAULT_SHARE
