"""Hold an engine to its contract: a write to a sealed config field raises, naming who wrote.

    with Seal(covered(vllm_config), fixed=fixed_values(contract, "target")) as seal:
        ...                       # the end of get_kv_cache_spec
        seal.enter(Phase.ALLOCATING)

`record_writes` watches in the same way and lets everything pass: it is how a probe learns what constructors do.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType

from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractViolation, Writer, as_text
from cluster.contract.facts import ConfigWrite, Role
from cluster.contract.phases import PERMITTED, SEALED, Phase
from cluster.contract.watch import UNSET, watch

_ORDER = list(Phase)


class Seal:
    """Configs whose sealed fields stay as they are, but for what vLLM may write in the current phase.

    The configs show nothing of it: they compare, copy, pickle and `replace` as before, and copies aren't sealed.
    Until `release` the seal keeps them alive. Enter `SHUTDOWN` before any clean-up: vLLM writes then, too.
    """

    def __init__(
        self,
        configs: Mapping[str, object],
        *,
        fixed: Mapping[str, object],
        phase: Phase = Phase.PLANNING,
    ) -> None:
        """Seal `configs`, by their names in `SEALED`.

        Args:
            fixed: values that the contract fixes, by `config.field`.
        """
        self._configs = dict(configs)
        self._fixed = dict(fixed)
        self._phase = phase
        self._values = dict(self._read())
        with ExitStack() as stops:
            for name, config in self._configs.items():
                stops.callback(watch(config, self._watcher(name)))
            self._stops = stops.pop_all()

    @property
    def phase(self) -> Phase:
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Go on to a later phase, once everything is as it should be at the end of this one.

        A shutdown may come at any time, after a failure and more than once (vLLM's does), so it checks nothing.

        Raises:
            ContractViolation: as `check` does, or a field that the contract fixes has another value.
            ValueError: the phase is an earlier one.
        """
        if phase is Phase.SHUTDOWN:
            self._phase = phase
            return
        if _ORDER.index(phase) < _ORDER.index(self._phase):
            raise ValueError(f"{phase.name} doesn't come after {self._phase.name}")
        self.check()
        for key, value in self._fixed.items():
            current = self._values.get(key, UNSET)
            if current not in (UNSET, None, value):
                raise ContractViolation(key, old=value, new=current, reason=f"the contract fixes {as_text(value)}")
        self._phase = phase

    def check(self) -> None:
        """Look for what no guard sees: changes inside a list or dict, and `object.__setattr__`.

        Raises:
            ContractViolation: a sealed field has another value than it was seen to be given.
        """
        current = dict(self._read())
        for key in self._values | current:
            old, new = self._values.get(key, UNSET), current.get(key, UNSET)
            if not (old is new or old == new):
                raise ContractViolation(key, old=old, new=new, reason="it was changed in place, past the seal")

    def release(self) -> None:
        """Let the configs go: for a shutdown, or a test."""
        self._stops.close()

    def __enter__(self) -> "Seal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _watcher(self, name: str) -> Callable[[str, object, object, Writer], None]:
        sealed = SEALED[name]

        def on_write(field: str, old: object, new: object, writer: Writer) -> None:
            if sealed is None or field in sealed:
                self._permit(f"{name}.{field}", old, new, writer)
                self._values[f"{name}.{field}"] = _snapshot(new)

        return on_write

    def _permit(self, key: str, old: object, new: object, writer: Writer) -> None:
        permit = PERMITTED[self._phase].get(key)
        if permit is not None and (permit.free or self._fixed.get(key, new) == new):
            return
        reason = f"sealed while {self._phase.value}"
        if key in self._fixed:
            reason += f"; the contract fixes {as_text(self._fixed[key])}"
        raise ContractViolation(key, old=old, new=new, writer=writer, reason=reason)

    def _read(self) -> Iterator[tuple[str, object]]:
        for name, config in self._configs.items():
            for field in SEALED[name] or vars(config):
                yield f"{name}.{field}", _snapshot(getattr(config, field, UNSET))


def _snapshot(value: object) -> object:
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def covered(vllm_config: object) -> dict[str, object]:
    """The configs of a VllmConfig that a contract covers, under the names that `Seal` knows."""
    configs = {name: getattr(vllm_config, name) for name in SEALED if name != "vllm_config"}
    present = {name: config for name, config in configs.items() if config is not None}
    return {**present, "vllm_config": vllm_config}


def fixed_values(contract: KVContract, role: Role) -> dict[str, object]:
    """What the contract fixes of one side's configs."""
    fixed: dict[str, object] = {
        "cache_config.kv_cache_layout": contract.side(role).layout,
        "cache_config.num_gpu_blocks": contract.num_blocks,
        # The hosted draft sizes its buffers for the target's requests, so its engine has the target's limit too.
        "model_config.max_model_len": contract.target.max_model_len,
    }
    sizes = {group.block_size for group in contract.groups_of(role)}
    if len(sizes) == 1:  # else the engine core keeps the smallest, and a worker what was configured
        fixed["cache_config.block_size"] = sizes.pop()
    if role == "target":
        fixed["cache_config.enable_prefix_caching"] = contract.enable_prefix_caching
        fixed["scheduler_config.enable_chunked_prefill"] = contract.enable_chunked_prefill
    return fixed


@contextmanager
def record_writes(configs: Mapping[str, object]) -> Iterator[list[ConfigWrite]]:
    """Collect every write that changes one of `configs`, named as the caller likes, while the block runs."""
    writes: list[ConfigWrite] = []

    def recorder(name: str) -> Callable[[str, object, object, Writer], None]:
        def on_write(field: str, old: object, new: object, writer: Writer) -> None:
            writes.append(
                ConfigWrite(
                    field=f"{name}.{field}",
                    old=as_text(old),
                    new=as_text(new),
                    writer=writer.class_name or writer.function,
                    location=writer.location,
                )
            )

        return on_write

    with ExitStack() as stops:
        for name, config in configs.items():
            stops.callback(watch(config, recorder(name)))
        yield writes
