"""A draft's process that is slow and steady: its stream stands still for a third of a second in each round."""

from typing import Any

from cluster.speculation import draft_process

_CYCLES = 600_000_000
"""Of a GPU's clock, which has up to 2 GHz."""


def main() -> int:
    load = draft_process._load

    def loading(*arguments: Any) -> Any:
        import torch  # not before the process has set itself up for it

        hosted = load(*arguments)
        propose = hosted.propose

        def slow(*arguments: Any) -> Any:
            torch.cuda._sleep(_CYCLES)
            return propose(*arguments)

        hosted.propose = slow  # type: ignore[method-assign]
        return hosted

    draft_process._load = loading
    return draft_process.main()


if __name__ == "__main__":
    draft_process.end(main())
