"""A sweep's folder: its plan, and a file for each run that has ended. A second start goes on with what is missing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from cluster.bench.sweep.plan import BenchPlan, Cell
from cluster.contract.codec import to_text
from cluster.errors import UserError
from cluster.outputs import hold, unwritable, write_whole

RUN_SCHEMA: Final = "dspark-cluster/bench-run/1"

_PLAN: Final = Path("plan.json")


class OtherSweepError(UserError):
    """The folder is another sweep's."""


class RunFolder:
    """Held by one process at a time, from construction to `close`. `plan` is with the model that a server has named."""

    def __init__(self, folder: Path, plan: BenchPlan) -> None:
        """Raises UserError where the folder can't be had, or is another sweep's."""
        self._folder = folder
        self.plan = plan
        try:
            (folder / "runs").mkdir(parents=True, exist_ok=True)
            self._held = (folder / "lock").open("a")
        except OSError as error:
            raise unwritable(folder, error) from error
        try:
            hold(self._held, folder)
            self._tie()
        except OSError as error:  # a file system without locks
            self._held.close()
            raise unwritable(folder, error) from error
        except BaseException:
            self._held.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._held.close()

    def begin(self, model: str) -> None:
        """The server that was there names this model. Raises OtherSweepError where the folder's named another."""
        if self.plan.model is None:
            self.plan = replace(self.plan, model=model)
            self._write_plan()
        elif self.plan.model != model:
            raise self._other(f"of the model {self.plan.model}, and this server's is {model}")

    def read(self, cell: Cell, repeat: int) -> dict[str, Any] | None:
        """A run that has ended, whether its figures can be used or not (`is_good`), or None."""
        try:
            run: dict[str, Any] = json.loads(self._file(cell, repeat).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(f"{self._file(cell, repeat)}", f"it can't be read ({error})", "remove it") from error
        return run

    def write(self, cell: Cell, repeat: int, run: dict[str, Any]) -> None:
        """Keep a run, wholly or not at all."""
        self.write_file(self._file(cell, repeat).relative_to(self._folder), json.dumps({"schema": RUN_SCHEMA, **run}))

    def write_file(self, name: Path, text: str) -> None:
        """Raises UserError where there is no room for it."""
        path = self._folder / name
        try:
            write_whole(path, text)
        except OSError as error:
            raise unwritable(path, error) from error

    def _file(self, cell: Cell, repeat: int) -> Path:
        return self._folder / "runs" / f"{cell.key}-{repeat}.json"

    def _tie(self) -> None:
        file = self._folder / _PLAN
        if not file.exists():
            if any((self._folder / "runs").iterdir()):
                why = f"it has runs, and no {_PLAN} that says of what"
                raise UserError(f"output {self._folder}", why, "choose another --output")
            self._write_plan()
            return
        before = json.loads(file.read_bytes())
        self.plan = replace(self.plan, model=before.get("model"))
        now = json.loads(self._plan_text())
        other = [key for key in now if before.get(key) != now[key]]
        if other:
            raise self._other(f"which differs in {', '.join(other)}")

    def _other(self, how: str) -> OtherSweepError:
        remedy = "repeat that one's command, or choose another --output"
        return OtherSweepError(f"output {self._folder}", f"it belongs to another sweep, {how}", remedy)

    def _write_plan(self) -> None:
        self.write_file(_PLAN, self._plan_text())

    def _plan_text(self) -> str:
        return to_text(self.plan.to_json())


def is_good(run: dict[str, Any] | None) -> bool:
    """Whether it needn't be run again: it has ended, nothing failed, and the generator kept up."""
    return run is not None and not run["why_not"]
