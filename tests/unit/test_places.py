"""What the places of a pair mean for its processes: the GPUs that each sees, and what carries their rounds."""

import pytest
from ray.util.placement_group import PlacementGroup

from actors.placement import Place, ReplicaPlaces
from cluster.channel.base import ChannelKind
from cluster.config import ChannelChoice
from cluster.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def place(node_id: str, gpus: float = 0.0) -> Place:
    resources = {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})
    return Place(group=PlacementGroup.empty(), bundle=0, resources=resources, node_id=node_id)


ON_CPUS = ReplicaPlaces(target=place("a"), draft=place("a"))
ON_GPUS = ReplicaPlaces(target=place("a", 1), draft=place("a", 1)).seeing_each_other(["3"], ["0"])
ON_TWO_HOSTS = ReplicaPlaces(target=place("a", 1), draft=place("b", 1))
ON_TWO_CPU_HOSTS = ReplicaPlaces(target=place("a"), draft=place("b"))


def environment(place: Place | None) -> dict[str, str]:
    assert place is not None
    return place.actor_options().get("runtime_env", {}).get("env_vars", {})


def test_each_sees_both_gpus_and_its_own_first() -> None:
    assert environment(ON_GPUS.target)[VISIBLE] == "3,0"
    assert environment(ON_GPUS.draft)[VISIBLE] == "0,3"
    # Without it Ray would set the process's own alone, after this.
    assert environment(ON_GPUS.target)["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"


def test_a_gpu_that_both_share_is_there_once() -> None:
    shared = ReplicaPlaces(target=place("a", 0.5), draft=place("a", 0.5)).seeing_each_other(["1"], ["1"])
    assert [environment(shared.target)[VISIBLE], environment(shared.draft)[VISIBLE]] == ["1", "1"]


@pytest.mark.parametrize("places", [ON_CPUS, ON_TWO_HOSTS], ids=["cpus", "two hosts"])
def test_elsewhere_ray_shows_a_process_its_own(places: ReplicaPlaces) -> None:
    assert environment(places.target) == environment(places.draft) == {}


@pytest.mark.parametrize(
    ("places", "choice", "kind"),
    [
        (ON_GPUS, "auto", "cuda_ipc"),
        (ON_CPUS, "auto", "shm"),
        (ON_TWO_HOSTS, "auto", "nccl"),
        (ON_TWO_CPU_HOSTS, "auto", "gloo"),
        (ON_GPUS, "shm", "shm"),
        (ON_CPUS, "gloo", "gloo"),
        (ON_GPUS, "nccl", "nccl"),
        (ON_TWO_HOSTS, "nccl", "nccl"),
        (ON_TWO_HOSTS, "gloo", "gloo"),
    ],
)
def test_the_channel_of_a_pair(places: ReplicaPlaces, choice: ChannelChoice, kind: ChannelKind) -> None:
    assert places.channel(choice) == kind


@pytest.mark.parametrize("choice", ["shm", "cuda_ipc"])
def test_a_channel_that_ends_at_its_host_is_refused_between_two(choice: ChannelChoice) -> None:
    with pytest.raises(UserError, match=f"channel.kind is {choice}: Ray has placed target and draft on two hosts"):
        ON_TWO_HOSTS.channel(choice)


def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(UserError, match=r"channel.kind is nccl: target and draft have no GPUs; take auto"):
        ON_CPUS.channel("nccl")
