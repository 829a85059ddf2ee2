"""A draft's process that forgets: on SIGUSR1 its whole KV cache is zero before the next round."""

import signal
from typing import Any

from cluster.speculation import draft_process, message_server

_pending: list[int] = []


def main() -> int:
    signal.signal(signal.SIGUSR1, lambda number, _frame: _pending.append(number))
    answer = message_server._answer

    def wiping(drafter: Any, *rest: Any, **more: Any) -> Any:
        import torch  # not before the process has set itself up for it

        while _pending:
            _pending.pop()
            with torch.inference_mode():
                for cache in drafter._hosted._runner.kv_caches:
                    cache.zero_()
        return answer(drafter, *rest, **more)

    message_server._answer = wiping
    return draft_process.main()


if __name__ == "__main__":
    draft_process.end(main())
