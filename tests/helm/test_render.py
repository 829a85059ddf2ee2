"""What the chart makes of values, and which values it takes."""

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest

from tests.helm.cases import CASES
from tests.helm.chart import CHART, CI, Manifest, container, load, render
from tests.helm.snapshots import SNAPSHOTS, snapshot

SCHEMAS = Path(__file__).parent / "schemas"
DEFINITION_OF = {
    "v1": "io.k8s.api.core.v1.",
    "batch/v1": "io.k8s.api.batch.v1.",
    "policy/v1": "io.k8s.api.policy.v1.",
    "networking.k8s.io/v1": "io.k8s.api.networking.v1.",
    "ray.io/v1": "",
    "monitoring.coreos.com/v1": "",
}
MODEL = {"model": {"target": "folder", "draft": "other"}}


@cache
def validator(definition: str) -> jsonschema.Draft202012Validator:
    """Of one kind; all published schemas in one document."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(SCHEMAS.glob("*.json"))]
    definitions = {name: each for document in documents for name, each in document["definitions"].items()}
    assert definition in definitions, f"{SCHEMAS} has no {definition}"
    return jsonschema.Draft202012Validator({"$ref": f"#/definitions/{definition}", "definitions": definitions})


def check(manifest: Manifest) -> None:
    found = validator(f"{DEFINITION_OF[manifest['apiVersion']]}{manifest['kind']}").iter_errors(manifest)
    errors = [f"{manifest['kind']} {error.json_path}: {error.message}" for error in found]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("name", CASES)
def test_manifests_are_as_kubernetes_and_kuberay_publish_them(name: str) -> None:
    rendered = render(CASES[name])
    for manifest in rendered.manifests:
        check(manifest)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered.manifests]
    assert len(set(names)) == len(names)
    assert rendered.notes.strip()


def test_a_field_that_nobody_knows_is_found() -> None:
    cluster = render(MODEL).one("RayCluster")
    for path in (("spec",), ("spec", "headGroupSpec"), ("spec", "headGroupSpec", "template", "spec")):
        broken = json.loads(json.dumps(cluster))
        within: Any = broken
        for key in path:
            within = within[key]
        within["unheardOf"] = True
        with pytest.raises(AssertionError, match="unheardOf"):
            check(broken)


@pytest.mark.parametrize("name", CI)
def test_helm_lint_is_content(name: str) -> None:
    report = helm_python.lint(CHART, CASES[name], strict=True, kube_version="v1.31.0")
    assert not report["errors"]


@pytest.mark.parametrize("name", CASES)
def test_snapshot(name: str) -> None:
    """What matters of each installation; `python -m tests.helm.snapshots` writes it anew, for you to look at."""
    recorded = (SNAPSHOTS / f"{name}.yaml").read_text(encoding="utf-8")
    assert snapshot(CASES[name]) == load(recorded)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"modle": {}}, "modle"),
        ({"model": {"target": "x", "draf": "y"}}, "draf"),
        ({"mode": "serving", **MODEL}, "mode"),
        ({"target": {"gpus": -1}, **MODEL}, "gpus"),
        ({"target": {"nodeSelctor": {}}, **MODEL}, "nodeSelctor"),
        ({"gateway": {"port": 70000}, **MODEL}, "port"),
        ({"gateway": {"tls": {"secretName": "Not_A_Name"}}, **MODEL}, "secretName"),
        ({"job": {"command": "rm"}, **MODEL}, "command"),
        ({"shm": {"size": "8 GB"}, **MODEL}, "size"),
        ({"target": {"rdma": {"resource": "rdma/hca"}}, **MODEL}, "count"),
        ({"gcsFaultTolerance": {"redisAddress": "redis"}, **MODEL}, "redisAddress"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(values: dict[str, Any], path: str) -> None:
    with pytest.raises(helm_python.HelmError, match=path):
        render(values)


def test_the_one_value_that_is_needed_is_named() -> None:
    with pytest.raises(helm_python.HelmError, match=r"model\.target is needed: a folder that every pod sees, or a hub"):
        render({})


TWO_RANKS: dict[str, Any] = {"config": {"engine": {"tensor_parallel_size": 2}}, **MODEL}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {},
            r"target\.gpus is 1 beside config\.engine\.tensor_parallel_size: 2: each .*; give target\.gpus=2",
        ),
        (
            {"target": {"gpus": 2}, "colocate": {"enabled": True, "sharedGpu": True}},
            r"colocate\.sharedGpu is set beside config\.engine\.tensor_parallel_size: 2: each .*; leave one of them",
        ),
    ],
)
def test_ranks_without_gpus_of_their_own_are_refused_before_there_are_pods(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        render(TWO_RANKS | values)


@pytest.mark.parametrize(("gpus", "of_a_process"), [(0, 0), (2, 2), (4, 2)])
def test_each_rank_has_a_gpu_where_there_are_any(gpus: int, of_a_process: int) -> None:
    settings = load(render(TWO_RANKS | {"target": {"gpus": gpus}}).settings)
    assert settings["pools"]["target"]["num_gpus"] == of_a_process
    assert settings["pools"]["draft"]["num_gpus"] == 1


@pytest.mark.parametrize("missing", ["--input", "--output"])
def test_a_batch_without_its_files_is_refused_before_it_has_gpus(missing: str) -> None:
    args = {"--input": "/models/in.jsonl", "--output": "/models/out.jsonl"}
    del args[missing]
    values = {"mode": "job", "job": {"args": [word for pair in args.items() for word in pair]}}
    with pytest.raises(helm_python.HelmError, match=rf"job\.args has no {missing}: a batch needs"):
        render(MODEL | values)


def test_a_job_that_has_ended_holds_no_gpus() -> None:
    """However it has: its workers are deleted at once, its head later."""

    def spec(**more: Any) -> Manifest:
        return render(MODEL | {"mode": "job", "job": {"command": "bench", "ttlSecondsAfterFinished": 60}} | more).one(
            "RayJob"
        )["spec"]

    rules = spec()["deletionStrategy"]["deletionRules"]
    for ended in ({"jobStatus": "SUCCEEDED"}, {"jobDeploymentStatus": "Failed"}):
        assert {"policy": "DeleteWorkers", "condition": ended | {"ttlSeconds": 0}} in rules
        assert {"policy": "DeleteCluster", "condition": ended | {"ttlSeconds": 60}} in rules
    for another in ({"kueue": {"queueName": "gpus"}}, {"autoscaling": {"enabled": True}}):
        job = spec(**another)
        assert "deletionStrategy" not in job
        assert (job["shutdownAfterJobFinishes"], job["ttlSecondsAfterFinished"]) == (True, 60)


@pytest.mark.parametrize("name", CASES)
def test_no_container_may_do_more_than_it_needs(name: str) -> None:
    for pod in render(CASES[name]).pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert pod["spec"]["automountServiceAccountToken"] == (
            "autoscaling" in CASES[name] and pod["metadata"]["labels"]["app.kubernetes.io/component"] == "head"
        )
        context = container(pod)["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert "resources" in container(pod)


def test_mounts_have_their_volumes() -> None:
    for values in CASES.values():
        for pod in render(values).pods():
            mounted = [mount["name"] for mount in container(pod)["volumeMounts"]]
            assert sorted(mounted) == sorted(volume["name"] for volume in pod["spec"]["volumes"])


def test_services_and_policies_select_pods_that_there_are() -> None:
    for values in CASES.values():
        rendered = render(values)
        pods = [pod["metadata"]["labels"].items() for pod in rendered.pods()]
        selectors = [service["spec"]["selector"] for service in rendered.all("Service")]
        selectors += [budget["spec"]["selector"]["matchLabels"] for budget in rendered.all("PodDisruptionBudget")]
        selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in rendered.all("NetworkPolicy")]
        selectors += [monitor["spec"]["selector"]["matchLabels"] for monitor in rendered.all("PodMonitor")]
        for selector in selectors:
            assert any(selector.items() <= labels for labels in pods), selector


def test_other_settings_make_another_run_and_the_same_ones_don_t() -> None:
    def run(**more: Any) -> tuple[str, str]:
        job = render(MODEL | more).one("Job")
        return job["metadata"]["name"], container(job["spec"]["template"])["command"][3]

    assert run() == run()
    changed = [run(config={"engine": {"max_num_seqs": 2}}), run(image={"tag": "new"}), run(up={"deadlineSeconds": 99})]
    names, runs = zip(run(), *changed, strict=True)
    # Kubernetes lets a job's deadline be changed, and it is none of the cluster's business.
    assert len(set(names)) == 3
    assert len(set(runs)) == 3


def test_names_stay_short_enough_for_what_kuberay_adds() -> None:
    long = render(MODEL | {"nameOverride": "x" * 60})
    for manifest in long.manifests:
        assert len(manifest["metadata"]["name"]) <= 52


def test_the_table_of_values_is_current() -> None:
    spec = importlib.util.spec_from_file_location("values_table", CHART.parent / "values_table.py")
    assert spec is not None
    assert spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert (CHART / "README.md").read_text(encoding="utf-8") == table.render(), "run python helm/values_table.py"


def test_every_value_is_described_and_has_its_default_in_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = load((CHART / "values.yaml").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    for path, each in parts_of(schema):
        assert each.get("description", "").endswith("."), path
        if "properties" in each:
            assert each["additionalProperties"] is False, path
    described = {path for path, _ in parts_of(schema)}
    for group in ("target", "draft", "head", "gateway"):
        described |= {f"{group}.{name}" for name in schema["$defs"]}
        described |= {f"{group}.resources.{name}" for name in ("requests", "limits")}
    for path in paths_of(values, described):
        assert path in described, path


def parts_of(schema: Manifest, path: str = "") -> list[tuple[str, Manifest]]:
    found: list[tuple[str, Manifest]] = []
    for name, value in [*schema.get("properties", {}).items(), *schema.get("$defs", {}).items()]:
        if "$ref" not in value:
            found += [(f"{path}{name}", value), *parts_of(value, f"{path}{name}.")]
    return found


def paths_of(values: Manifest, described: set[str], path: str = "") -> list[str]:
    """Down to those whose parts are the user's own."""
    found = []
    for name, value in values.items():
        found.append(f"{path}{name}")
        if isinstance(value, dict) and any(each.startswith(f"{path}{name}.") for each in described):
            found += paths_of(value, described, f"{path}{name}.")
    return found
