"""A server of a scripted engine whose rounds have drafts, and sweeps of one variant over it."""

from tests.unit.serving.conftest import loop, start

__all__ = ["loop", "start"]
