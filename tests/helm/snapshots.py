"""What matters of each installation, short enough to be read. `python -m tests.helm.snapshots` records it anew."""

from pathlib import Path
from typing import Any

import yaml

from tests.helm.cases import CASES
from tests.helm.chart import Manifest, container, load, render

SNAPSHOTS = Path(__file__).parent / "snapshots"


def snapshot(values: dict[str, Any]) -> dict[str, Any]:
    rendered = render(values)
    taken: dict[str, Any] = {
        "objects": sorted(f"{each['kind']} {each['metadata']['name']}" for each in rendered.manifests),
        "settings": load(rendered.settings),
        "groups": {name: _group(group) for name, group in rendered.groups.items()},
    }
    for job in rendered.all("RayJob"):
        large = ("rayClusterSpec", "submitterPodTemplate")
        taken["job"] = {key: value for key, value in job["spec"].items() if key not in large}
    if labels := [each["metadata"]["labels"] for each in rendered.manifests if each["apiVersion"] == "ray.io/v1"]:
        taken["queue"] = {key: value for key, value in labels[0].items() if key.startswith("kueue")}
    return taken


def _group(group: Manifest) -> dict[str, Any]:
    pod = group["template"]
    main = container(pod)
    kept = ("image", "ports", "resources", "startupProbe", "readinessProbe", "lifecycle")
    return {
        "pods": {key: group[key] for key in ("replicas", "minReplicas", "maxReplicas") if key in group},
        "ray": {"labels": group["labels"], **group["rayStartParams"]},
        "annotations": pod["metadata"].get("annotations", {}),
        "where": {key: pod["spec"][key] for key in ("nodeSelector", "runtimeClassName") if key in pod["spec"]},
        "grace": pod["spec"].get("terminationGracePeriodSeconds"),
        "capabilities": main["securityContext"]["capabilities"],
        "env": [each["name"] for each in main["env"]],
        "mounts": {mount["mountPath"]: mount["name"] for mount in main["volumeMounts"]},
        **{key: main[key] for key in kept if key in main},
    }


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for old in SNAPSHOTS.glob("*.yaml"):
        old.unlink()
    for name, values in CASES.items():
        (SNAPSHOTS / f"{name}.yaml").write_text(yaml.safe_dump(snapshot(values), width=120), encoding="utf-8")
