"""A draft's process that ends at a position which its rotary table doesn't have: vLLM's kernels read past it unseen."""

from typing import Any, Final

from cluster.speculation import draft_process

CONTEXT: Final = 64


def main() -> int:
    load = draft_process._load

    def load_bounded(*arguments: Any) -> Any:
        from cluster.speculation import draft_seam  # imports vLLM, before which a process is to be known

        input_batch = draft_seam.input_batch

        def bounded(**fields: Any) -> Any:
            last = int(fields["positions"].max())
            if last >= CONTEXT:
                raise IndexError(f"position {last} of {CONTEXT}")
            return input_batch(**fields)

        draft_seam.input_batch = bounded
        return load(*arguments)

    draft_process._load = load_bounded
    return draft_process.main()


if __name__ == "__main__":
    draft_process.end(main())
