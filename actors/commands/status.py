"""`dspark-cluster status`: a cluster's actors, nodes, contracts, and figures."""

import sys
import time
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from actors.commands.up import describe_pair
from actors.session import session
from actors.view import ClusterView, view

_WATCH_PERIOD_S: Final = 1.0

_PIPE_WIDTH: Final = 160


def status(address: str | None, namespace: str, *, watch: bool, json_output: bool) -> None:
    """Show it once, or with `watch` until the user interrupts. Raises UserError where there is no cluster."""
    with session(address, namespace):
        if json_output:
            print(view().to_json())
            return
        # A pipe has no width, and a squeezed table loses names.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        if not watch:
            console.print(_report(view()))
            return
        with Live(_report(view()), console=console, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(_WATCH_PERIOD_S)
                    live.update(_report(view()), refresh=True)
            except KeyboardInterrupt:
                return


def _report(now: ClusterView) -> RenderableType:
    return Group(
        _table("actor", "host", "state", "running", "requests", "KV in use", "accept. length", rows=_actors(now)),
        *(escape(describe_pair(index, pair)) for index, pair in enumerate(now.pairs)),
        _table("node", rows=[(str(node),) for node in now.nodes]),
        _figures(now),
    )


def _actors(now: ClusterView) -> list[tuple[str, ...]]:
    activity = {member.name: member.activity for pair in now.pairs for member in pair.members}
    rows: list[tuple[str, ...]] = []
    if (gateway := now.gateway) is not None:
        state = "draining" if gateway.draining else "serving" if gateway.serving else "no replica in service"
        rows.append(("gateway", gateway.address, state, f"{gateway.running}, {gateway.queued} wait"))
    for name, target in now.targets.items():
        if target is None:
            rows.append((name, "", "no answer"))
            continue
        state = "dead" if target.dead else "ready" if target.ready else activity.get(name, "starting")
        if state == "ready" and now.gateway is not None and name in now.gateway.drained:
            state = "draining" if target.running else "drained"
        length = "" if target.acceptance is None else f"{target.acceptance.acceptance_length:.2f}"
        figures = (str(target.running), str(target.requests), f"{target.kv_cache_usage:.0%}", length)
        rows.append((name, target.host, state, *figures))
    for name, draft in now.drafts.items():
        rows.append((name, draft.host if draft else "", activity.get(name, "away") if draft else "no answer"))
    return rows


def _figures(now: ClusterView) -> str:
    text = f"requests: {now.requests:,}"
    if (acceptance := now.acceptance) is None:
        return text
    by_position = " ".join(f"{rate:.0%}" for rate in acceptance.rate_by_position)
    return (
        f"{text}; acceptance length {acceptance.acceptance_length:.2f} over {acceptance.rounds:,} rounds, "
        f"accepted by position {by_position}"
    )


def _table(*columns: str, rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    table.add_row()
    return table
