"""What the chart says, the code must know: commands and options, settings, ports, variables, metrics, files."""

import ast
import importlib.util
import json
import re
import runpy
import shlex
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client import CollectorRegistry
from ray.dashboard.modules.job.cli import job_cli_group

from actors.cli import app
from cluster.config import load_config, parse_override
from cluster.serving.admission import Admission
from cluster.serving.federation import federated
from cluster.serving.metrics import ServiceMetrics
from cluster.serving.round_metrics import RoundCollector
from cluster.serving.service import SERVICE_NAME
from cluster.speculation.rounds import RoundReport, RoundTimes
from tests.helm.cases import CASES
from tests.helm.chart import CHART, RELEASE, Manifest, Rendered, container, load, render

ROOT = Path(__file__).parents[2]
COMING: set[str] = set()
"""Commands that are being built."""

OF_THE_SYSTEM = {"HOME"}
READ_BY = {
    "DSPARK_CACHE": "cluster.cache",
    "HF_HOME": "huggingface_hub.constants",
    "HF_TOKEN": "huggingface_hub.utils._auth",
    "RAY_API_SERVER_ADDRESS": "ray._private.ray_constants",
    "RAY_AUTH_MODE": "ray._private.authentication.authentication_token_setup",
    "RAY_AUTH_TOKEN": "ray._private.runtime_env.image_uri",
    "RAY_JOB_STOP_WAIT_TIME_S": "ray.dashboard.modules.job.job_supervisor",
}
"""Which module reads each variable that the chart sets."""


def command_lines(rendered: Rendered) -> set[tuple[str, ...]]:
    """Every command line of ours and of Ray's: in pods, hooks, scripts and notes."""
    found: set[tuple[str, ...]] = set()
    for pod in rendered.pods():
        main = container(pod)
        hook = main.get("lifecycle", {}).get("preStop", {}).get("exec", {})
        for words in (main.get("command"), hook.get("command")):
            found |= commands_among(words or [])
    texts = [job["spec"]["entrypoint"] for job in rendered.all("RayJob")]
    if script := rendered.config.get("up.py"):
        strings = (node.value for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Constant))
        texts += [value for value in strings if isinstance(value, str) and value.startswith("dspark-cluster ")]
    texts += [line for line in rendered.notes.splitlines() if line.startswith("  ")]  # the others are prose
    for text in texts:
        found |= commands_in(text)
    return found


def commands_in(text: str) -> set[tuple[str, ...]]:
    """In a text for a shell, quoted ones too."""
    found: set[tuple[str, ...]] = set()
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        simple: list[str] = []
        for token in [*lexer, ";"]:
            if set(token) <= set("();<>|&"):
                if token[0] in "<>" and simple and simple[-1].isdigit():
                    simple.pop()  # the number of what is redirected
                found |= commands_among(simple)
                simple = []
            else:
                simple.append(token)
    return found


def commands_among(words: list[str]) -> set[tuple[str, ...]]:
    """In one simple command, such as `ray job submit ... -- dspark-cluster up ...`."""
    found = {command for word in words if " " in word for command in commands_in(word)}
    for begin, word in enumerate(words):
        if word == "dspark-cluster":
            return found | {tuple(words[begin:])}
        if words[begin : begin + 2] == ["ray", "job"]:
            return found | {tuple(words[begin:])} | commands_among(words[begin + 2 :])
    return found


def parse(words: Sequence[str]) -> None:
    """Fails where the command line isn't one of the command's."""
    program, *words = words if words[0] == "dspark-cluster" else words[1:]
    group: Any = typer.main.get_command(app) if program == "dspark-cluster" else job_cli_group
    assert words[0] in group.commands, f"{program} has no command {words[0]}"
    group.commands[words[0]].make_context(words[0], words[1:])


@pytest.mark.parametrize("name", CASES)
def test_commands_and_their_options_exist(name: str) -> None:
    for words in command_lines(render(CASES[name])):
        parse(words)


def test_no_command_is_overlooked() -> None:
    """What the test above has read."""
    serve = {" ".join(words[:3]) for words in command_lines(render(CASES["defaults"]))}
    for expected in (
        "dspark-cluster drain --here",
        "dspark-cluster generate --address",
        "dspark-cluster up cluster.yaml",
    ):
        assert expected in serve
    assert {"dspark-cluster status", "dspark-cluster down"} <= serve
    assert any(words.startswith("ray job submit") for words in serve)
    assert "dspark-cluster batch --config" in {
        " ".join(words[:3]) for words in command_lines(render(CASES["cpu-batch"]))
    }


@pytest.mark.parametrize("name", CASES)
def test_the_settings_file_is_one(name: str, tmp_path: Path) -> None:
    rendered = render(CASES[name])
    file = tmp_path / "cluster.yaml"
    file.write_text(rendered.settings)
    settings = load_config(file)
    pools = {pool: getattr(settings.pools, pool).labels["pool"] for pool in ("target", "draft") if settings.model.draft}
    for pool in pools.values():
        assert rendered.groups[pool]["labels"]["pool"] == pool, "Ray's nodes have the label that is asked for"
    if service := rendered.all("Service"):
        gateway = container(rendered.groups["gateway"]["template"])
        ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
        assert settings.gateway.labels == rendered.groups["gateway"]["labels"]
        assert ports["grpc"] == settings.gateway.port == service[0]["spec"]["ports"][0]["port"]
        assert ports["dspark-metrics"] == settings.gateway.metrics_port
        probe = gateway["readinessProbe"]
        if settings.gateway.tls is None:
            assert probe["grpc"] == {"port": settings.gateway.port, "service": SERVICE_NAME}
        for path in (settings.gateway.tls.certificate,) if settings.gateway.tls else ():
            assert str(path.parent) in {mount["mountPath"] for mount in gateway["volumeMounts"]}
        head = container(rendered.groups["head"]["template"])
        if settings.gateway.token_file is not None:  # read by `up`, which runs there
            assert str(settings.gateway.token_file.parent) in {mount["mountPath"] for mount in head["volumeMounts"]}
        for group in rendered.groups.values():
            assert group["template"]["spec"]["terminationGracePeriodSeconds"] > settings.gateway.drain_grace_s


def test_variables_are_read_by_somebody() -> None:
    given = {
        variable["name"]
        for values in CASES.values()
        for pod in render(values).pods()
        for variable in container(pod)["env"]
    }
    own = {variable["name"] for variable in CASES["everything"]["target"]["env"]}
    read = set(READ_BY) | OF_THE_SYSTEM | own
    assert given <= read
    for variable, module in READ_BY.items():
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin)
        texts = source.parent.rglob("*.py") if source.name == "__init__.py" else [source]
        assert any(variable in text.read_text() for text in texts), f"{module} doesn't read {variable}"


def test_metrics_exist() -> None:
    asked = {name for query in (*panel_queries(), *alert_queries().values()) for name in metrics_in(query)}
    assert len(asked) > 15
    assert asked <= own_metrics() | vllms_metrics()


def test_drafts_that_are_lost_or_rest_and_requests_that_move_are_shown() -> None:
    shown = metrics_in(" ".join(panel_queries()))
    assert {"dspark_draft_losses_total", "dspark_drafts_resting", "dspark_moved_requests"} <= shown
    assert "dspark_draft_losses_total" in metrics_in(alert_queries()["DsparkDraftFlaps"])


def test_what_an_alert_tells_to_change_are_settings() -> None:
    told = {
        path
        for rule in alert_rules()
        for path in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", rule["annotations"]["description"])
    }
    assert told
    for path in told:
        within: Any = load_config(None, [parse_override("model.target=t")])
        for name in path.split("."):
            within = getattr(within, name)


def panel_queries() -> list[str]:
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return queries + [variable["query"]["query"] for variable in dashboard["templating"]["list"][1:]]


def alert_queries() -> dict[str, str]:
    return {rule["alert"]: rule["expr"] for rule in alert_rules()}


def alert_rules() -> list[Manifest]:
    (group,) = render(CASES["everything"]).one("PrometheusRule")["spec"]["groups"]
    rules: list[Manifest] = group["rules"]
    return rules


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:dspark_|vllm:)[a-z0-9_]+", query))


def own_metrics() -> set[str]:
    """Every sample's name on a gateway's page, from the collectors that make it."""
    admission = Admission(max_running=1, max_queued=1)
    metrics = ServiceMetrics(admission)
    metrics.ended("Generate", "OK", 0.1)
    metrics.admitted(0.1)
    metrics.follow_moves(lambda: 0)
    rounds = CollectorRegistry()
    rounds.register(RoundCollector(RoundReport(times=RoundTimes(), epoch=1, lost=False)))
    families = [*metrics.registry.collect(), *rounds.collect(), *federated([], {"target-0": ""})]
    return {sample.name for family in families for sample in family.samples}


def vllms_metrics() -> set[str]:
    """By what vLLM's source names them, with the endings that Prometheus' client adds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    sources = [Path(spec.origin).parent / "v1" / name for name in ("metrics/loggers.py", "spec_decode/metrics.py")]
    names = {name for source in sources for name in re.findall(r'"(vllm:[a-z0-9_]+)"', source.read_text())}
    return {f"{name}{ending}" for name in names for ending in ("", "_total", "_bucket")}


def test_paths_in_the_image_are_those_of_the_container_file() -> None:
    (folder,) = of_the_image("WORKDIR")
    for values in CASES.values():
        draft = str(values["model"].get("draft", ""))
        if draft.startswith(f"{folder[0]}/"):
            assert (ROOT / draft.removeprefix(f"{folder[0]}/") / "config.json").exists()
    defaults = load((CHART / "values.yaml").read_text())
    assert {user[0] for user in of_the_image("USER")} == {str(defaults["podSecurityContext"]["runAsUser"])}


def test_the_image_is_made_of_what_is_here() -> None:
    """By commands that the Makefile has, of locks that there are, for a Python that they are for."""
    makefile = (ROOT / "Makefile").read_text()
    left_out = (ROOT / ".containerignore").read_text().split()
    (version,) = re.findall(
        r"/python:(\d+)\.(\d+)-", " ".join(word for words in of_the_image("FROM") for word in words)
    )
    installer = runpy.run_path(str(ROOT / "requirements" / "install.py"))
    assert installer["OLDEST"] <= tuple(map(int, version)) <= installer["NEWEST"]
    for *sources, _ in of_the_image("COPY"):
        for source in sources:
            assert (ROOT / source).exists()
    for needed in ("Makefile", "pyproject.toml", "README.md", "LICENSE", "requirements", "cluster", "actors", "protos"):
        assert (ROOT / needed).exists()
        assert not any(fnmatch(needed, pattern) for pattern in left_out), needed
    made = [re.findall(r"make PROFILE=(\w+) (\w+)", " ".join(words)) for words in of_the_image("RUN")]
    profiles = dict(found for each in made for found in each)
    assert set(profiles) == {"cpu", "gpu"} == stages() - {"base"}
    for profile, target in profiles.items():
        assert f"\n{target}:" in makefile
        assert (ROOT / "requirements" / f"{profile}.txt").exists()


def test_the_readmes_five_commands_are_true() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    lines = [shlex.split(line) for line in section.partition("```bash\n")[2].partition("```")[0].splitlines()]
    build, operator, install, wait, test = lines
    chart = load((CHART / "Chart.yaml").read_text())
    assert build[build.index("--target") + 1] in stages()
    assert operator[:4] == ["helm", "install", "kuberay", "kuberay-operator"]
    assert install[:2] == ["helm", "install"]
    assert (ROOT / install[3]) == CHART
    rendered = render(values_of(install[install.index("--set") + 1]))
    image = container(rendered.groups["target"]["template"])["image"]
    assert image == build[build.index("-t") + 1] == f"REGISTRY/dspark-cluster:{chart['appVersion']}-gpu"
    (job,) = rendered.all("Job")
    asked = dict(label.split("=") for label in wait[wait.index("-l") + 1].split(","))
    assert test[:3] == ["helm", "test", asked["app.kubernetes.io/instance"]] == ["helm", "test", install[2]]
    assert (asked | {"app.kubernetes.io/instance": RELEASE}).items() <= job["metadata"]["labels"].items()


def of_the_image(instruction: str) -> list[list[str]]:
    """The words of each such line of the Containerfile."""
    text = (ROOT / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [words for name, *words in lines if name == instruction]


def stages() -> set[str]:
    """Those of the Containerfile, by the names that --target takes."""
    return {words[-1] for words in of_the_image("FROM")}


def values_of(settings: str) -> dict[str, Any]:
    """Of helm's --set."""
    values: dict[str, Any] = {}
    for setting in settings.split(","):
        path, _, value = setting.partition("=")
        *parents, last = path.split(".")
        within = values
        for parent in parents:
            within = within.setdefault(parent, {})
        within[last] = value
    return values
