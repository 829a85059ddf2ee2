"""The serve command's life around a scripted engine, as a process of its own."""

import asyncio

from cluster.commands.serve import serve_engine
from cluster.serving.settings import ServerSettings
from tests.serving.scripted_engine import ScriptedEngine

if __name__ == "__main__":
    asyncio.run(serve_engine(ScriptedEngine(step_s=0.02), ServerSettings(port=0)))
