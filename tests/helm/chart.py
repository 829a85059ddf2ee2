"""The chart as an installation would see it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "helm" / "dspark-cluster"
RELEASE, NAMESPACE = "demo", "prod"
NAME = f"{RELEASE}-dspark-cluster"

Values = Mapping[str, Any]
Manifest = Mapping[str, Any]

CI = {path.name.removesuffix("-values.yaml"): path for path in sorted((CHART / "ci").glob("*-values.yaml"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    manifests: Sequence[Manifest]
    notes: str

    def one(self, kind: str) -> Manifest:
        (found,) = self.all(kind)
        return found

    def all(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    @property
    def cluster(self) -> Manifest:
        """The spec of the RayCluster, wherever it is."""
        jobs = self.all("RayJob")
        return jobs[0]["spec"]["rayClusterSpec"] if jobs else self.one("RayCluster")["spec"]

    @property
    def settings(self) -> str:
        """The cluster's settings file."""
        return self.config["cluster.yaml"]

    @property
    def config(self) -> Mapping[str, str]:
        """The files that every pod has."""
        (found,) = (each for each in self.all("ConfigMap") if "cluster.yaml" in each["data"])
        return found["data"]

    @property
    def groups(self) -> dict[str, Manifest]:
        """Ray's groups of pods by name."""
        return {"head": self.cluster["headGroupSpec"]} | {
            group["groupName"]: group for group in self.cluster["workerGroupSpecs"]
        }

    def pods(self) -> Iterator[Manifest]:
        """All templates of pods, Ray's and others."""
        yield from (group["template"] for group in self.groups.values())
        yield from (job["spec"]["template"] for job in self.all("Job"))
        yield from (job["spec"]["jobTemplate"]["spec"]["template"] for job in self.all("CronJob"))
        yield from self.all("Pod")
        for job in self.all("RayJob"):
            if "submitterPodTemplate" in job["spec"]:
                yield job["spec"]["submitterPodTemplate"]


def container(pod: Manifest) -> Manifest:
    """The one that a pod has."""
    (found,) = pod["spec"]["containers"]
    return found


def ci_values(name: str) -> dict[str, Any]:
    return load(CI[name].read_text(encoding="utf-8"))


def load(text: str) -> Any:
    """YAML by the C library: the manifests are thousands of lines."""
    return yaml.load(text, yaml.CSafeLoader)


def render(values: Values) -> Rendered:
    """Raises helm_python.HelmError as `helm install` would end with it."""
    return _render(json.dumps(values))


@cache
def _render(values_json: str) -> Rendered:
    values = json.loads(values_json)
    chart = _chart()
    chart.validate_schema(values)
    files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    notes = files.pop("dspark-cluster/templates/NOTES.txt")
    documents = (each for text in files.values() for each in yaml.load_all(text, yaml.CSafeLoader))
    return Rendered(manifests=[each for each in documents if each is not None], notes=notes)


@cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)
