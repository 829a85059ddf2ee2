"""`dspark-cluster serve`: one target, with or without a draft, behind the gRPC generation API."""

import asyncio
import signal

import typer

from cluster.commands.terminal import messages
from cluster.engine.settings import EngineSettings
from cluster.serving import logs
from cluster.serving.engine import GenerationEngine
from cluster.serving.server import GenerationServer
from cluster.serving.settings import ServerSettings

REPLICA = "replica-0"


def serve(settings: EngineSettings, listening: ServerSettings) -> None:
    """Load the models, then serve until a signal comes; exit code 1 where the engine dies. Raises UserError."""
    # Here, not above: this imports vLLM and torch.
    from cluster.engine.async_engine import AsyncEngine

    logs.to_stderr(REPLICA)
    if not listening.is_loopback and listening.tls is None:
        messages.print(f"{listening.host}: others can connect, and nothing is encrypted without --tls-certificate")
    with messages.status(f"loading {settings.target.name}"):
        engine = AsyncEngine(settings)
    asyncio.run(serve_engine(engine, listening))


async def serve_engine(engine: GenerationEngine, listening: ServerSettings) -> None:
    """Serve a loaded engine until a signal comes or it dies, and close it."""
    try:
        server = GenerationServer(engine, listening, replica=REPLICA)
        await server.start()
        print(f"serving {engine.model.name} on {server.address}; Ctrl-C stops it", flush=True)
        signalled = await _until_signal_or_death(server)
        await server.stop()
        # Ctrl-C reaches the engine's process too: then its end is what was asked for.
        if engine.dead and not signalled:
            messages.print("dspark-cluster: the engine has died; --debug shows its log", style="red")
            raise typer.Exit(1)
    finally:
        await engine.close()


async def _until_signal_or_death(server: GenerationServer) -> bool:
    """Whether it was a signal."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stopping.set)
    waiting = [asyncio.create_task(stopping.wait()), asyncio.create_task(server.wait_until_dead())]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    return stopping.is_set()
