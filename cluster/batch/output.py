"""A batch's output: a line for each request that was answered, in the order of their ends, only ever appended to.

Beside OUTPUT lie OUTPUT.batch.json, which says whose output it is, and OUTPUT.failed.jsonl, the failures of the last
run, where there were some. A process that is killed loses no line: each is handed to the system as a whole before the
next. A machine that fails loses those of the last second, and they are run again. A last line that was cut off is
removed.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from cluster.batch.lines import BatchInput, BatchLine
from cluster.contract.codec import from_plain, parse, to_text
from cluster.contract.errors import DocumentError
from cluster.errors import UserError
from cluster.outputs import hold, unwritable, write_whole

BATCH_SCHEMA: Final = "dspark-cluster/batch/1"
"""Another number for any change that could break a reader, or a resumption."""

_SYNC_PERIOD_S: Final = 1.0
"""Of work that a failing machine may lose; one fsync takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tie:
    """The side file: what other answers would come from. `model` is empty before the server has named it."""

    schema: str
    input_sha256: str
    defaults: str
    """Of fields that a line leaves out, as sorted JSON."""
    model: str


class BatchOutput:
    """Held by one process at a time, from construction to `close`. `done` are the indices of lines that are there,
    `failures` is the file of those that failed."""

    def __init__(
        self,
        path: Path,
        batch: BatchInput,
        defaults: Mapping[str, Any],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`defaults` are those that the batch was read with.

        Raises:
            UserError: the file can't be had, or is another batch's.
        """
        self._path = path
        self._clock = clock
        self.failures = Path(f"{path}.failed.jsonl")
        self._tie_file = Path(f"{path}.batch.json")
        self._tie = _Tie(
            schema=BATCH_SCHEMA,
            input_sha256=batch.digest,
            defaults=json.dumps(dict(defaults), sort_keys=True),
            model="",
        )
        self._indices = {line.index for line in batch.lines}
        try:
            self._file = path.open("ab", buffering=0)  # what a failed write has left behind can't come back at `close`
        except OSError as error:
            raise unwritable(self._path, error) from error
        try:
            hold(self._file, path)
            self._check_tie()
            self.done = self._recover()
        except OSError as error:  # a file system without locks
            self._file.close()
            raise unwritable(path, error) from error
        except BaseException:
            self._file.close()
            raise
        self._synced_s = self._clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, model: str) -> None:
        """Lines come from this model. Raises UserError where those that are there came from another."""
        try:
            self.failures.unlink(missing_ok=True)
            if self._tie.model:
                self._require("model", self._tie.model, model)
                return
            self._tie = replace(self._tie, model=model)
            write_whole(self._tie_file, to_text(asdict(self._tie)))
        except OSError as error:
            raise unwritable(self._path, error) from error

    def append(self, line: BatchLine, answer: dict[str, Any]) -> None:
        """Keep the line's answer, after `begin`. Raises UserError where there is no room for it."""
        data = json.dumps({"index": line.index, "id": line.id, **answer}, ensure_ascii=False).encode() + b"\n"
        try:
            unwritten = memoryview(data)
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
            if self._clock() - self._synced_s >= _SYNC_PERIOD_S:
                self._sync()
        except OSError as error:
            raise unwritable(self._path, error) from error

    def fail(self, line: BatchLine, status: str, why: str) -> None:
        """Tell of a line that wasn't answered; the next run tries it again."""
        record = {"index": line.index, "id": line.id, "status": status, "error": why}
        try:
            with self.failures.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise unwritable(self._path, error) from error

    def close(self) -> None:
        """Every line is on the disk after it."""
        try:
            self._sync()
        except OSError as error:
            raise unwritable(self._path, error) from error
        finally:
            self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_s = self._clock()

    def _check_tie(self) -> None:
        """Take the model from the side file, where there was a run before."""
        try:
            before = from_plain(_Tie, parse(self._tie_file.read_bytes()))
        except FileNotFoundError:
            if self._path.stat().st_size:
                why = f"it is there, and no {self._tie_file.name} beside it says that a batch wrote it"
                raise UserError(f"output {self._path}", why, "choose another --output") from None
            return
        except OSError as error:
            raise unwritable(self._path, error) from error
        except DocumentError as error:
            raise error.at(str(self._tie_file)) from error
        for name in ("schema", "input_sha256", "defaults"):
            self._require(name, getattr(before, name), getattr(self._tie, name))
        self._tie = before

    def _require(self, name: str, before: object, now: object) -> None:
        if before != now:
            raise UserError(
                f"output {self._path}",
                f"it belongs to another batch: its {name} is {before}, this one's {now}",
                "repeat that batch's command, or choose another --output",
            )

    def _recover(self) -> set[int]:
        """The indices of the lines that are there, once a last one that was cut off is gone."""
        done = set[int]()
        whole = 0
        with self._path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.endswith(b"\n"):
                    whole += len(text)
                    done.add(self._index(number, text, done))
        self._file.truncate(whole)
        return done

    def _index(self, number: int, text: bytes, done: set[int]) -> int:
        try:
            index = parse(text).get("index")
        except DocumentError as error:
            raise self._spoilt(number) from error
        if type(index) is not int or index in done or index not in self._indices:
            raise self._spoilt(number)
        return index

    def _spoilt(self, number: int) -> UserError:
        why = "it isn't a line of this batch, or there twice"
        return UserError(f"{self._path}, line {number}", why, "remove it, or choose another --output")
