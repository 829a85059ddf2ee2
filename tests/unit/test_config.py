"""A config file is taken as it was meant, or refused with the path of the key."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, Override, load_config, parse_override
from cluster.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = "model: {target: models/target}\n"
PAIR = "model: {target: models/target, draft: models/draft}\n"


def load(tmp_path: Path, text: str, *flags: str) -> ClusterConfig:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return load_config(file, [parse_override(flag) for flag in flags])


def refused(tmp_path: Path, text: str, *flags: str) -> str:
    with pytest.raises(UserError) as refusal:
        load(tmp_path, text, *flags)
    line = str(refusal.value)
    assert len(line.splitlines()) == 1
    return line.replace(str(tmp_path / "cluster.yaml"), "FILE")


def test_the_example_for_a_cpu() -> None:
    config = load_config(EXAMPLES / "cpu.yaml")
    assert config.model.draft == "models/draft"
    assert config.engine.max_model_len == 1024
    assert config.ray.address is None
    assert config.pools.replicas == 1


def test_the_example_for_one_gpu() -> None:
    config = load_config(EXAMPLES / "shared-gpu.yaml")
    assert (config.pools.target.num_gpus, config.pools.draft.num_gpus) == (0.5, 0.5)
    assert config.pools.hosts == "same"
    assert config.engine.gpu_memory_utilization == 0.75


def test_the_example_for_two_gpus() -> None:
    config = load_config(EXAMPLES / "two-gpus.yaml")
    assert (config.pools.target.num_gpus, config.pools.draft.num_gpus) == (1, 1)
    assert config.pools.hosts == "same"
    assert config.channel.kind == "auto"


def test_the_example_for_two_hosts() -> None:
    config = load_config(EXAMPLES / "two-hosts.yaml")
    assert config.pools.hosts == "different"
    assert config.pools.draft.labels == {"pool": "draft"}
    assert config.channel.kind == "auto"
    assert config.contract.strict
    assert config.gateway.is_loopback


def test_the_example_for_two_hosts_says_how_other_machines_reach_it(tmp_path: Path) -> None:
    text = (EXAMPLES / "two-hosts.yaml").read_text()
    config = load(tmp_path, text.replace("\n# ", "\n"))
    assert not config.gateway.is_loopback
    assert config.gateway.tls is not None
    assert config.gateway.token_file is not None


def test_every_example_is_loaded_here() -> None:
    names = {"cpu.yaml", "shared-gpu.yaml", "two-gpus.yaml", "two-hosts.yaml"}
    assert {file.name for file in EXAMPLES.iterdir()} == names


def test_a_config_cannot_be_changed(tmp_path: Path) -> None:
    config = load(tmp_path, TARGET)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.pools.replicas = 2  # type: ignore[misc]


def test_a_whole_number_where_a_fraction_may_be(tmp_path: Path) -> None:
    assert load(tmp_path, TARGET + "ray: {start_timeout_s: 20}").ray.start_timeout_s == 20.0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("pools: {replicas: two}", "FILE: pools.replicas is 'two': it must be an integer; change it"),
        ("pools: {replicas: true}", "FILE: pools.replicas is True: it must be an integer; change it"),
        ("pools: {replicas: 1.5}", "FILE: pools.replicas is 1.5: it must be an integer; change it"),
        ("pools: {replicas: 0}", "FILE: pools.replicas is 0: it must be positive; change it"),
        ("pools: {draft: {num_cpus: -1}}", "FILE: pools.draft.num_cpus is -1.0: it must be 0 or more; change it"),
        ("pools: {draft: {num_cpus: .nan}}", "FILE: pools.draft.num_cpus is nan: it must be 0 or more; change it"),
        ("pools: {draft: 3}", "FILE: pools.draft is 3: it must be an object; change it"),
        ("pools: {draft: {labels: {pool: 1}}}", "FILE: pools.draft.labels.pool is 1: it must be a string; change it"),
        ("pools: {draft: {labels: {1: a}}}", "FILE: pools.draft.labels.1 is the key 1: it must be a string; change it"),
        (
            "pools: {hosts: near}",
            "FILE: pools.hosts is 'near': it must be one of 'any', 'same', 'different'; change it",
        ),
        ("engine: {max_num_seqs: 0}", "FILE: engine.max_num_seqs is 0: it must be positive; change it"),
        ("contract: {attention_backend: ''}", "contract.attention_backend is '': it must be inherit, auto or a name"),
        ("channel: {round_deadline_s: 0}", "FILE: channel.round_deadline_s is 0.0: it must be a positive number of"),
        ("ray: {namespace: ''}", "FILE: ray.namespace is empty: it must be a name; change it"),
        ("engine: {gpu_memory_utilization: 1.5}", "engine.gpu_memory_utilization is 1.5: it must be above 0 and at"),
        (
            "pools: {draft: {num_cpus: 0, num_gpus: 0}}",
            "pools.draft.num_cpus is 0 beside num_gpus: 0: it must be above",
        ),
        (
            "pools: {target: {num_gpus: 8}}",
            "pools.target.num_gpus is 8: it must be at most 1: a target has as many as engine.tensor_parallel_size",
        ),
        (
            "engine: {tensor_parallel_size: 2}",
            "pools.target.num_gpus is left out beside engine.tensor_parallel_size: 2: it must be 2, or 0",
        ),
        (
            "engine: {tensor_parallel_size: 2}\npools: {target: {num_gpus: 2}, draft: {num_gpus: 2}}",
            "pools.draft.num_gpus is 2: it must be at most 1",
        ),
        ("engine: {tensor_parallel_size: 0}", "engine.tensor_parallel_size is 0: it must be positive"),
        ("gateway: {port: 70000}", "FILE: gateway.port is 70000: it must be from 0, for any free one, to 65535"),
        ("gateway: {limits: {max_running: 0}}", "FILE: gateway.limits.max_running is 0: it must be from 1 to 2,147,4"),
        ("gateway: {limits: {max_queued: -1}}", "FILE: gateway.limits.max_queued is -1: it must be from 0 to 2,147,4"),
        ("gateway: {limits: {max_n: 0}}", "FILE: gateway.limits.max_n is 0: it must be from 1 to 2,147,483,647"),
        ("gateway: {limits: {max_message_bytes: 3000000000}}", "limits.max_message_bytes is 3000000000: it must be"),
        ("gateway: {max_moves: -1}", "FILE: gateway.max_moves is -1: it must be 0 or more; change it"),
        ("gateway: {return_s: -1}", "FILE: gateway.return_s is -1.0: it must be a finite number of seconds, 0 or more"),
        ("gateway: {return_s: .inf}", "FILE: gateway.return_s is inf: it must be a finite number of seconds, 0 or"),
        ("gateway: {drain_grace_s: .nan}", "FILE: gateway.drain_grace_s is nan: it must be a finite number of seconds"),
        (
            "gateway: {tls: {certificate: 1, key: k}}",
            "FILE: gateway.tls.certificate is 1: it must be a path; change it",
        ),
        ("pools: {hosts: different}\nchannel: {kind: shm}", "channel.kind is shm with pools.hosts: different"),
    ],
)
def test_a_value_that_cannot_be(tmp_path: Path, text: str, line: str) -> None:
    assert line in refused(tmp_path, PAIR + text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("pool: {replicas: 2}", "FILE: pool: there is no such key; did you mean pools? There are model, engine,"),
        ("pools: {draft: {gpus: 1}}", "FILE: pools.draft.gpus: there is no such key; did you mean num_gpus? There are"),
        ("ray: {xyz: 1}", "FILE: ray.xyz: there is no such key; there are address, namespace,"),
        (
            "gateway: {limits: {max_runing: 1}}",
            "FILE: gateway.limits.max_runing: there is no such key; did you mean max_r",
        ),
        ("gateway: {token: x}", "FILE: gateway.token: there is no such key; did you mean token_file? There are"),
        ("5: 1", "FILE: 5: there is no such key; there are model,"),
    ],
)
def test_a_key_that_is_not_known(tmp_path: Path, text: str, line: str) -> None:
    assert refused(tmp_path, PAIR + text).startswith(line)


def test_no_target(tmp_path: Path) -> None:
    assert refused(tmp_path, "model: {}") == "FILE: model.target: it is missing; give it"
    assert refused(tmp_path, "pools: {}") == "FILE: model: it is missing; give it"


def test_a_colocated_draft_has_no_workers(tmp_path: Path) -> None:
    colocated = PAIR + "pools: {placement: colocated}\n"
    assert load(tmp_path, PAIR).has_draft_workers
    assert not load(tmp_path, colocated).has_draft_workers
    assert not load(tmp_path, TARGET).has_draft_workers
    assert "pools.placement is colocated without a draft" in refused(tmp_path, TARGET + "pools: {placement: colocated}")
    assert "pools.hosts is different without a draft worker" in refused(tmp_path, colocated, "pools.hosts=different")
    assert "contract is given with pools.placement: colocated" in refused(tmp_path, colocated, "contract.strict=true")


def test_what_a_draft_is_needed_for(tmp_path: Path) -> None:
    assert "pools.hosts is different without a draft" in refused(tmp_path, TARGET + "pools: {hosts: different}")
    line = refused(tmp_path, "model: {target: t, num_speculative_tokens: 4}")
    assert "model.num_speculative_tokens is given without a draft" in line


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- a", "it isn't a mapping"),
        ("", "it isn't a mapping"),
        ("model: {target: a", "it isn't YAML"),
        ("model: {target: a, target: b}", "a key occurs twice in this mapping line 1"),
        ("model: !!python/object:os.system {}", "it isn't YAML"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, why: str) -> None:
    assert why in refused(tmp_path, text)


@pytest.mark.parametrize("setting", ["load_format=dummy", "synthetic_acceptance_length=3"])
def test_what_only_a_benchmark_wants_is_no_part_of_production(setting: str) -> None:
    flags = [parse_override(each) for each in ("model.target=t", "model.draft=d", f"model.{setting}")]
    assert not load_config(None, flags).model.acceptance_is_measured
    with pytest.raises(UserError, match="beside production: true"):
        load_config(None, [*flags, parse_override("production=true")])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read"):
        load_config(tmp_path / "none.yaml")


def test_the_gateways_token_comes_from_its_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    config = load(tmp_path, TARGET + f"gateway: {{token_file: {token}, port: 0, limits: {{max_running: 3}}}}")
    settings = config.gateway.server_settings()
    assert (settings.token, settings.port, settings.limits.max_running) == ("secret", 0, 3)
    assert "secret" not in repr(config) + repr(settings)
    token.unlink()
    with pytest.raises(UserError, match="can't be read"):
        config.gateway.server_settings()


def test_the_gateways_files_of_tls_are_read_where_it_runs_on_this_machine(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    tls = f"tls: {{certificate: {certificate}, key: {key}"
    here = load(tmp_path, TARGET + f"gateway: {{{tls}}}}}").gateway
    certificate.write_text("-----BEGIN CERTIFICATE-----")
    with pytest.raises(UserError, match=r"TLS key .*/key: it can't be read"):
        here.server_settings()
    key.write_text("secret")
    with pytest.raises(UserError, match=r"TLS key .*/key: it is no PEM file"):
        here.server_settings()
    key.write_text("-----BEGIN PRIVATE KEY-----")
    assert here.server_settings().tls == here.tls
    for where, authority in (("", "client CA .*/absent: it can't be read"), (", labels: {pool: gateways}", None)):
        mutual = load(tmp_path, TARGET + f"gateway: {{{tls}, client_ca: {tmp_path / 'absent'}}}{where}}}").gateway
        with nullcontext() if authority is None else pytest.raises(UserError, match=authority):
            mutual.server_settings()


@pytest.mark.parametrize(
    ("text", "flags", "max_running"),
    [
        ("", (), 16),
        ("engine: {max_num_seqs: 32}\npools: {replicas: 4}", (), 128),
        ("engine: {max_num_seqs: 32}\ngateway: {limits: {max_queued: 0}}", ("pools.replicas=2",), 64),
        ("engine: {max_num_seqs: 32}\ngateway: {limits: {max_running: 8}}", ("pools.replicas=2",), 8),
        ("engine: {max_num_seqs: 32}", ("gateway.limits.max_running=8",), 8),
    ],
)
def test_the_gateway_admits_what_all_engines_run_at_once_unless_it_is_told(
    tmp_path: Path, text: str, flags: tuple[str, ...], max_running: int
) -> None:
    config = load(tmp_path, TARGET + text, *flags)
    assert config.gateway.limits.max_running == max_running
    assert config.gateway.server_settings().limits.max_running == max_running


def test_a_flag_takes_the_place_of_the_files_value(tmp_path: Path) -> None:
    config = load(tmp_path, PAIR + "pools: {replicas: 2}", "pools.replicas=3", "pools.draft.labels={pool: draft}")
    assert config.pools.replicas == 3
    assert config.pools.draft.labels == {"pool": "draft"}


def test_flags_alone() -> None:
    config = load_config(None, [Override(path="model.target", value="models/target", flag="--target models/target")])
    assert config.model.target == "models/target"


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("pools.replicas=none", "--set pools.replicas=none: pools.replicas is 'none': it must be an integer; change"),
        ("pools.replica=1", "--set pools.replica=1: pools.replica: there is no such key; did you mean replicas?"),
        ("pools.draft={gpus: 1}", "--set pools.draft={gpus: 1}: pools.draft.gpus: there is no such key; did you mean"),
        ("model.target.x=1", "--set model.target.x=1: target is no section; name a key by its whole path"),
        ("pools.replicas", "--set pools.replicas: it has no KEY=VALUE"),
        ("pools.replicas={", "--set pools.replicas={: it isn't YAML"),
    ],
)
def test_a_flag_that_is_wrong_is_named(tmp_path: Path, flag: str, line: str) -> None:
    assert refused(tmp_path, PAIR, flag).startswith(line)
