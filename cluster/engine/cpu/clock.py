"""Where a step's time goes on a CPU: seconds by kernel, interpreted ones and stand-ins."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton.runtime import interpreter
from vllm.triton_utils import dispatcher


@dataclass(slots=True)
class KernelTime:
    """Launches of one kernel and the seconds they took together."""

    name: str
    stand_in: bool
    launches: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class KernelClock:
    """Kernel times by name, filled while `running`."""

    times: dict[str, KernelTime] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time every kernel launch of this process in the meantime."""
        interpreted = interpreter.InterpretedFunction.run
        stand_in = dispatcher.KernelOverride._launch

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self._time(kernel.fn.__name__, False, lambda: interpreted(kernel, *args, **kwargs))

        def launch(override: Any, *args: Any, **kwargs: Any) -> None:
            self._time(override.__name__, True, lambda: stand_in(override, *args, **kwargs))

        interpreter.InterpretedFunction.run = run
        dispatcher.KernelOverride._launch = launch
        try:
            yield
        finally:
            interpreter.InterpretedFunction.run = interpreted
            dispatcher.KernelOverride._launch = stand_in

    def _time(self, name: str, stand_in: bool, launch: Callable[[], None]) -> None:
        start = time.perf_counter()
        launch()
        entry = self.times.setdefault(name, KernelTime(name=name, stand_in=stand_in))
        entry.launches += 1
        entry.seconds += time.perf_counter() - start
