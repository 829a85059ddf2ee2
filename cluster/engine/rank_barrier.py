"""The contract's barriers across the tensor-parallel ranks of one engine: the first one is the coordinator's member.

At each barrier every rank says what it has found, over vLLM's CPU group of the ranks; the first one takes it to the
coordinator, and then tells the others to go on. A rank that finds fault says that instead, and the first one raises it.
If it is the first that gives up, its executor ends the others where they wait.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from vllm.distributed.parallel_state import get_tp_group

from cluster.contract.contract import KVContract
from cluster.contract.errors import ContractViolation
from cluster.contract.facts import SideFacts
from cluster.contract.ranks import facts_of_all
from cluster.control.member import Member
from cluster.errors import UserError

_Said = str | UserError | ContractViolation


class FirstRank:
    """Methods are phases, as those of a Member, and raise what those do, and what another rank has found."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def agree(self, facts: SideFacts) -> tuple[SideFacts, KVContract]:
        """The facts of all ranks, and the contract for each of them."""
        of_all = facts_of_all([SideFacts.from_json(said) for said in _heard(facts.to_json())])
        contract = self._member.agree(of_all)
        _tell(contract.to_json())
        return of_all, contract

    def accept(self, contract: KVContract) -> None:
        self._pass(self._member.accept, contract)

    def ready(self, contract: KVContract) -> None:
        self._pass(self._member.ready, contract)

    def reporting(self) -> AbstractContextManager[None]:
        """Tell the other side why this one gives up."""
        return self._member.reporting()

    def _pass(self, barrier: Callable[[KVContract], None], contract: KVContract) -> None:
        _heard(contract.digest)
        barrier(contract)
        _tell(contract.digest)


class FurtherRank:
    """The same of another rank, which waits for the first."""

    def agree(self, facts: SideFacts) -> tuple[SideFacts, KVContract]:
        _say(facts.to_json())
        return facts, KVContract.from_json(_told())

    def accept(self, contract: KVContract) -> None:
        _say(contract.digest)
        _told()

    def ready(self, contract: KVContract) -> None:
        _say(contract.digest)
        _told()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the first rank why this one gives up."""
        try:
            yield
        except (UserError, ContractViolation) as error:
            _say(error)
            raise


def _heard(own: str) -> list[str]:
    """At the first rank: what each says, itself first."""
    group = get_tp_group()
    if group.world_size == 1:
        return [own]
    said: list[_Said] = [own] * group.world_size
    torch.distributed.gather_object(own, said, dst=group.ranks[0], group=group.cpu_group)
    for one in said:
        if not isinstance(one, str):
            raise one
    return [one for one in said if isinstance(one, str)]


def _say(what: _Said) -> None:
    group = get_tp_group()
    torch.distributed.gather_object(what, None, dst=group.ranks[0], group=group.cpu_group)


def _tell(what: str) -> None:
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast_object_list([what], src=group.ranks[0], group=group.cpu_group)


def _told() -> str:
    group, told = get_tp_group(), [""]
    torch.distributed.broadcast_object_list(told, src=group.ranks[0], group=group.cpu_group)
    return told[0]
