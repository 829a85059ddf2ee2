"""What a cluster is built from: frozen dataclasses, one a component, out of one YAML file and the command line's flags.

A key that isn't known, a value of another type and one that can't be are refused with the key's path, what was found
and what is allowed. Nothing is looked up here: whether a model is there shows when it is opened.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

import yaml

from cluster.channel.base import ChannelKind
from cluster.channel.faults import FaultsConfig
from cluster.contract.codec import from_plain
from cluster.contract.errors import DocumentError, require_positive
from cluster.contract.policy import Policy
from cluster.engine.settings import EngineOptions, LoadFormat
from cluster.errors import UserError
from cluster.serving.settings import ListenSettings, ServerSettings, check_tls, read_token
from cluster.speculation.settings import DEFAULT_ROUND_DEADLINE_S, DEFAULT_STALL_LIMIT_S

DEFAULT_NAMESPACE: Final = "dspark-cluster"

Hosts = Literal["any", "same", "different"]
ChannelChoice = Literal["auto", ChannelKind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Folders or hub names, which every host must find under the same name."""

    target: str
    draft: str | None = None
    """None: the target decodes alone."""
    num_speculative_tokens: int | None = None
    """Drafted a round (K); None for what the draft was trained for."""
    load_format: LoadFormat = "auto"
    """dummy: random weights, for times and memory alone. The folders need a config and the target's tokenizer."""
    synthetic_acceptance_length: float | None = None
    """Tokens a round on average, the target's own included, whatever is drafted: the answers are not the target's."""

    def __post_init__(self) -> None:
        require_positive(num_speculative_tokens=self.num_speculative_tokens)
        for name in ("num_speculative_tokens", "synthetic_acceptance_length"):
            if getattr(self, name) is not None and self.draft is None:
                raise DocumentError(name, "given without a draft", "left out, or `draft` given")
        length = self.synthetic_acceptance_length
        if length is not None and not 1 <= length < math.inf:
            raise DocumentError("synthetic_acceptance_length", str(length), "from 1 to one more than is drafted")

    @property
    def acceptance_is_measured(self) -> bool:
        """Whether what is accepted says anything of these models."""
        return self.load_format != "dummy" and self.synthetic_acceptance_length is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """What one process of the pool gets of its host, and which hosts it may be on."""

    num_cpus: float = 1.0
    num_gpus: float | None = None
    """A share of a GPU, or a whole one, or a target's `engine.tensor_parallel_size` of them; None for a whole one, or
    for none with vLLM's CPU build."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's label selectors: a label of the node, and a value or `in(...)`, `!value`, `!in(...)`.
    `ray.io/accelerator-type` is the GPU's kind."""

    def __post_init__(self) -> None:
        for name, value in (("num_cpus", self.num_cpus), ("num_gpus", self.num_gpus)):
            if value is not None and not 0 <= value < math.inf:
                raise DocumentError(name, str(value), "0 or more")
        if self.num_cpus == 0 and self.num_gpus == 0:
            raise DocumentError("num_cpus", "0 beside num_gpus: 0", "above 0: Ray places nothing that needs nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsConfig:
    """Target replicas, each with a draft worker of its own, if there is a draft."""

    replicas: int = 1
    placement: Literal["separate", "colocated"] = "separate"
    """colocated: there are no draft workers; each replica has the draft in its process, vLLM's own speculation."""
    hosts: Hosts = "any"
    """Of a replica and its draft worker. `same` is what shared memory and CUDA IPC need; `any` prefers it."""
    target: PoolConfig = field(default_factory=PoolConfig)
    draft: PoolConfig = field(default_factory=PoolConfig)

    def __post_init__(self) -> None:
        require_positive(replicas=self.replicas)

    @property
    def shared_gpu(self) -> float | None:
        """The part of a GPU that a target and its draft have together; None where neither shares its own."""
        of_target = self.target.num_gpus
        return None if of_target is None or not 0 < of_target < 1 else of_target + (self.draft.num_gpus or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConfig:
    """What carries the rounds between a replica and its draft worker."""

    kind: ChannelChoice = "auto"
    """auto: between GPUs cuda_ipc on one host and nccl on two, without GPUs shm and gloo."""
    round_deadline_s: float = DEFAULT_ROUND_DEADLINE_S
    """For rounds of a size that hasn't been seen a few times yet."""
    stall_limit_s: float | None = DEFAULT_STALL_LIMIT_S
    """Beyond the longest of the last rounds of that size, from when the target, or its GPU's stream, waits for the
    draft; then the target goes on alone, until the draft has come back. None waits for the deadline."""
    rest_slow_drafts: bool = True
    """Switch drafts off, for a while, at batch sizes where they cost more than they save."""

    def __post_init__(self) -> None:
        _require_seconds(round_deadline_s=self.round_deadline_s)
        if self.stall_limit_s is not None:
            _require_seconds(stall_limit_s=self.stall_limit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ListenSettings):
    """The generation service, in one process on the machine that starts the cluster, or on a node with `labels`."""

    token_file: Path | None = None
    """Holds the bearer token that clients must send."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def admitting(self, max_running: int) -> Self:
        """The same with another number of choices at once."""
        return replace(self, limits=replace(self.limits, max_running=max_running))

    def server_settings(self) -> ServerSettings:
        """With the token out of its file. Raises UserError where that, or a file of TLS on this machine, can't be
        used."""
        if self.tls is not None and not self.labels:  # else they may be another node's
            check_tls(self.tls)
        token = None if self.token_file is None else read_token(self.token_file)
        return ServerSettings(token=token, **{each.name: getattr(self, each.name) for each in fields(ListenSettings)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Where the cluster's actors live."""

    address: str | None = None
    """Of a Ray cluster to join, `HOST:PORT`; None starts one on this machine."""
    namespace: str = DEFAULT_NAMESPACE
    """Actors find each other in it: two clusters in one Ray need two."""
    placement_timeout_s: float = 60.0
    start_timeout_s: float = 900.0
    """For every actor to be ready: it may be reading weights of hundreds of gigabytes."""

    def __post_init__(self) -> None:
        _require_seconds(placement_timeout_s=self.placement_timeout_s, start_timeout_s=self.start_timeout_s)
        if not self.namespace:
            raise DocumentError("namespace", "empty", "a name")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The whole file."""

    model: ModelConfig
    engine: EngineOptions = field(default_factory=EngineOptions)
    contract: Policy = field(default_factory=Policy)
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    channel: ChannelConfig = field(default_factory=ChannelConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    faults: FaultsConfig | None = None
    """On purpose, for tests."""
    production: bool = False
    """Refuses what is only for tests."""

    def __post_init__(self) -> None:
        if self.production and self.faults is not None:
            raise DocumentError("faults", "given beside production: true", "left out: they are for tests")
        if self.production and self.model.load_format == "dummy":
            raise DocumentError("model.load_format", "dummy beside production: true", "left out: it is for benchmarks")
        if self.production and self.model.synthetic_acceptance_length is not None:
            raise DocumentError(
                "model.synthetic_acceptance_length", "given beside production: true", "left out: it is for benchmarks"
            )
        kind = self.channel.kind
        if self.pools.hosts == "different" and kind in ("shm", "cuda_ipc"):
            raise DocumentError(
                "channel.kind", f"{kind} with pools.hosts: different", f"gloo, nccl or auto: {kind} ends at its host"
            )
        if self.pools.placement == "colocated" and self.model.draft is None:
            raise DocumentError("pools.placement", "colocated without a draft", "left out, or model.draft given")
        if self.pools.hosts == "different" and not self.has_draft_workers:
            raise DocumentError(
                "pools.hosts", "different without a draft worker", "left out, or a draft given, and placement: separate"
            )
        if self.pools.placement == "colocated" and self.contract != Policy():
            raise DocumentError(
                "contract",
                "given with pools.placement: colocated",
                "left out: it is for two processes, and this is one",
            )
        self._check_gpus()

    def _check_gpus(self) -> None:
        size, pools = self.engine.tensor_parallel_size, self.pools
        for role, pool in (("target", pools.target), ("draft", pools.draft)):
            path, found = f"pools.{role}.num_gpus", "left out" if pool.num_gpus is None else f"{pool.num_gpus:g}"
            if size > 1 and role == "target":
                if pool.num_gpus not in (0, size):
                    beside = f"{found} beside engine.tensor_parallel_size: {size}"
                    raise DocumentError(path, beside, f"{size}, or 0 with vLLM's CPU build")
            elif pool.num_gpus is not None and pool.num_gpus > 1:
                raise DocumentError(path, found, "at most 1: a target has as many as engine.tensor_parallel_size")

    @property
    def has_draft_workers(self) -> bool:
        """Whether drafts are in processes of their own."""
        return self.model.draft is not None and self.pools.placement == "separate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A value that a flag puts in the place of the file's. `path` is the key's, such as `pools.replicas`."""

    path: str
    value: Any
    flag: str
    """As the user typed it, for messages."""


def parse_override(text: str) -> Override:
    """`--set KEY=VALUE`; the value is read as YAML. Raises UserError where it can't be."""
    flag = f"--set {text}"
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise UserError(flag, "it has no KEY=VALUE", "write, for example, --set pools.replicas=2")
    return Override(path=path.strip(), value=_parse_yaml(value, flag), flag=flag)


def load_config(file: Path | None, overrides: Sequence[Override] = ()) -> ClusterConfig:
    """The file's config with the overrides in place; without a file, of the overrides alone.

    Where neither gives `gateway.limits.max_running`, the gateway admits as many choices as all engines together run.

    Raises:
        UserError: naming the file, or the flag, the key's path, what was found and what is allowed.
    """
    plain = _read(file) if file is not None else {}
    for override in overrides:
        _put(plain, override)
    try:
        config = from_plain(ClusterConfig, plain)
        if "max_running" in plain.get("gateway", {}).get("limits", {}):
            return config
        return replace(config, gateway=config.gateway.admitting(config.engine.max_num_seqs * config.pools.replicas))
    except DocumentError as error:
        raise error.at(_source(error.path, file, overrides)) from error


def _read(file: Path) -> Any:
    try:
        plain = _parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {file}", f"it can't be read ({error})", "check its path and encoding") from error
    if not isinstance(plain, dict):
        raise UserError(f"config file {file}", "it isn't a mapping of keys to values", "begin with `model:`")
    return plain


class _Loader(yaml.SafeLoader):
    """YAML's own answer to a key that occurs twice is to forget the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key occurs twice in this mapping", node.start_mark)
        return mapping


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        why = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise UserError(source, f"it isn't YAML ({why})", "mend it there") from error


def _put(plain: dict[str, Any], override: Override) -> None:
    *parents, last = override.path.split(".")
    for parent in parents:
        nested = plain.setdefault(parent, {})
        if not isinstance(nested, dict):
            raise UserError(override.flag, f"{parent} is no section", "name a key by its whole path")
        plain = nested
    plain[last] = override.value


def _source(path: str, file: Path | None, overrides: Sequence[Override]) -> str:
    """Who said what is wrong at `path`."""
    flags = [
        each.flag for each in overrides if path == each.path or path.startswith((f"{each.path}.", f"{each.path}["))
    ]
    if flags:
        return flags[-1]
    return str(file) if file is not None else "the config"


def _require_seconds(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise DocumentError(name, str(value), "a positive number of seconds")
