"""A worker's line to whoever issues contracts: what crosses the barrier, whatever carries it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from cluster.contract.contract import KVContract
from cluster.contract.facts import SideFacts


class Negotiator(ABC):
    """A worker's line to whoever issues contracts. Built in the worker from `additional_config["contract"]`."""

    @abstractmethod
    def __init__(self, settings: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def agree(self, facts: SideFacts) -> KVContract:
        """Report what this side would allocate, and wait for the contract.

        Raises:
            ContractError: refused.
        """

    @abstractmethod
    def ready(self, digest: str) -> None:
        """Report that this side's plan is as contracted, and wait until the other side's is.

        Raises:
            ContractError: the other side can't keep the contract.
        """

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Report that this side gives up, so that the other doesn't wait."""
