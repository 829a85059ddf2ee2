"""A draft's process that finds its layers built otherwise than contracted: it must build them again.

A CPU has one attention backend. So what differs is said, not so: the contract's names are what the draft is built with.
"""

from collections.abc import Iterator
from typing import Any

from cluster.speculation import draft_process


def main() -> int:
    load = draft_process._load

    def load_otherwise(*arguments: Any) -> Any:
        from cluster.engine.contract_worker import Difference  # imports vLLM, before which a process is to be known
        from cluster.speculation.draft_seam import DraftWorker

        differences, load_model = DraftWorker.differences, DraftWorker.load_model
        loads: list[int] = []

        def as_if_otherwise(worker: Any) -> Iterator[Difference]:
            if len(loads) == 1:
                group = worker.groups_of_layers[0]
                yield Difference("attention_config.backend", group.layers[0], group.attention_backend, "ANOTHER")
            yield from differences(worker)

        def counting(worker: Any, **options: Any) -> None:
            loads.append(1)
            load_model(worker, **options)

        DraftWorker.differences, DraftWorker.load_model = as_if_otherwise, counting
        return load(*arguments)

    draft_process._load = load_otherwise
    return draft_process.main()


if __name__ == "__main__":
    draft_process.end(main())
