"""The coordinator's process: `python -m cluster.control.coordinator_process`, started by `ChildProcess`.

It ends when its standard input ends, which is when the process that started it does.
"""

import asyncio
import sys

from cluster.contract.codec import from_plain
from cluster.control.child_process import Start, read_start
from cluster.control.service import serving
from cluster.control.settings import CoordinatorSettings
from cluster.errors import UserError


async def run(start: Start) -> None:
    settings = from_plain(CoordinatorSettings, start.settings)
    async with serving(settings):
        start.acknowledge()
        _say(f"waits for a target and a draft at {settings.address}")
        await asyncio.to_thread(sys.stdin.buffer.read)
    _say("stops")


def _say(what: str) -> None:
    print(f"coordinator {what}", file=sys.stderr, flush=True)


def main() -> int:
    try:
        asyncio.run(run(read_start()))
    except UserError as error:
        _say(f"stops: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
