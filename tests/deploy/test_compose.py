"""deploy/compose.yaml: valid, agreed with the server, and with no secret of its own."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_serve.kv_tiers.mac import MacKeys, read_mac_keys
from lora_serve.kv_tiers.secret_files import redis_password
from lora_serve.server.http.keys import read_keys
from lora_serve.server.operation import Access
from lora_serve.server.routes import OPERATIONS
from tests.deploy.command_lines import DEPLOY, compose, compose_command, settings

OF_THE_USER = ("./models", "./adapters")
SERVICES = {"lora-serve", "cache", "prometheus", "grafana", "gateway"}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which deploy/make-secrets has run."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    directory = tmp_path_factory.mktemp("secrets")
    make_secrets(directory)
    return directory


def make_secrets(directory: Path) -> str:
    command = [str(DEPLOY / "make-secrets"), str(directory), getpass.getuser()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    return done.stdout


def test_composes_own_grammar_takes_it() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="needs the extra deploy")
    file = compose_spec.PyCompose.from_yaml(yaml.safe_dump(compose()))
    file.validate()  # networks, volumes and secrets that services name are there
    assert set(file.service_names()) == SERVICES
    wrong = compose()
    wrong["services"]["cache"]["restrat"] = "always"
    with pytest.raises(ValueError, match="restrat"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(wrong))


def test_the_server_takes_its_command_and_asks_for_keys() -> None:
    engine, server = settings(compose_command())
    service = compose()["services"]["lora-serve"]
    assert server.api_key_file
    assert server.admin_api_key_file
    assert server.isolates_keys
    assert engine.scheduler.fair_share == "key"
    assert engine.kv_tiers.kv_mac_key_file
    assert engine.lora.lora_allowed_roots == ("/adapters",)
    (port,) = service["ports"]
    assert port == f"127.0.0.1:8000:{server.port}", "reached from this machine alone"
    assert float(service["stop_grace_period"].removesuffix("s")) > server.drain_timeout + 10
    assert "healthcheck" not in service, "the image's own asks at the right port"


def test_a_model_may_be_named_and_may_be_left_out() -> None:
    assert settings(compose_command())[0].model.model != "/models/base"
    named = compose({"LORA_SERVE_MODEL": "/models/base"})["services"]["lora-serve"]["command"]
    assert settings(named)[0].model.model == "/models/base"


def test_every_service_says_whether_it_is_well_and_comes_back() -> None:
    services = compose()["services"]
    assert set(services) == SERVICES
    for name, service in services.items():
        assert service["restart"] == "always"
        assert "healthcheck" in service or name == "lora-serve"
        for other in service.get("depends_on", ()):
            assert service["depends_on"][other]["condition"] == "service_healthy"


def test_a_hole_in_a_service_gains_nothing() -> None:
    for name, service in compose()["services"].items():
        if name == "gateway":  # nginx begins as root, for port 443 and the key
            assert service["cap_add"] == ["CHOWN", "NET_BIND_SERVICE", "SETGID", "SETUID"]
        else:
            assert int(service["user"]) > 0
            assert "cap_add" not in service
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_what_is_not_for_clients_is_reached_from_this_machine_alone_or_not_at_all() -> None:
    page = compose()
    for name, service in page["services"].items():
        ports = service.get("ports", [])
        outside = [port for port in ports if not port.startswith("127.0.0.1:")]
        assert outside == (["443:443"] if name == "gateway" else [])
    assert page["services"]["cache"]["networks"] == ["inside"]
    assert page["networks"]["inside"] == page["networks"]["monitoring"] == {"internal": True}


def test_no_key_and_no_password_stands_in_the_file() -> None:
    engine, server = settings(compose_command())
    assert (server.api_key, server.admin_api_key) == ((), ())
    assert "@" not in str(engine.kv_tiers.kv_redis_url)
    for service in compose()["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASS|KEY|TOKEN|SECRET", name):
                assert name.endswith("__FILE")
                assert value.startswith("/run/secrets/")
    assert "GF_SECURITY_ADMIN_PASSWORD__FILE" in compose()["services"]["grafana"]["environment"]


def test_every_secret_is_made_and_given_to_its_service(secrets: Path) -> None:
    page = compose({"SECRETS_DIR": str(secrets)})
    for secret in page["secrets"].values():
        assert Path(secret["file"]).is_file()
    for service in page["services"].values():
        told = yaml.safe_dump([service.get(k) for k in ("command", "environment", "healthcheck")])
        named = set(re.findall(r"/run/secrets/([\w.]+)", told))
        assert named == set(service.get("secrets", ()))


def test_the_secrets_are_taken_and_never_made_again(secrets: Path) -> None:
    _, server = settings(compose_command().replace("/run/secrets/tenants", "T"))
    assert server.api_key_file == "T"
    config = settings(
        f"serve --api-key-file {secrets}/tenants.keys --admin-api-key-file {secrets}/admin.keys"
    )[1]
    read = read_keys(config)
    assert (len(read.api), len(read.admin)) == (2, 1)
    assert len({*read.api, *read.admin}) == 3
    key_id, _ = read_mac_keys(str(secrets / "kv.keys")).sign(b"", b"")
    assert key_id != MacKeys().sign(b"", b"")[0]
    password = redis_password(str(secrets / "redis.key"))
    conf = (secrets / "redis.conf").read_text()
    assert f"requirepass {password}\n" in conf
    assert "maxmemory-policy volatile-lru" in conf, "what leads to blocks must stay"
    assert {path.stat().st_mode & 0o777 for path in secrets.iterdir()} == {0o400}
    before = {path.name: path.read_bytes() for path in secrets.iterdir()}
    assert "made" not in make_secrets(secrets)
    assert {path.name: path.read_bytes() for path in secrets.iterdir()} == before


def test_valkey_starts_with_its_file_and_answers_to_its_health_check(secrets: Path) -> None:
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    client = shutil.which("valkey-cli") or shutil.which("redis-cli")
    if server is None or client is None:
        pytest.skip("needs redis-server")
    socket = secrets.parent / "valkey.sock"
    more = ["--port", "0", "--unixsocket", str(socket)]
    (check,) = compose()["services"]["cache"]["healthcheck"]["test"][1:]
    check = check.replace("$$", "$").replace("/run/secrets/redis", str(secrets / "redis.key"))
    asked = check.replace("valkey-cli", f"{client} -s {socket}")
    open_to_all = asked.replace(f"$(cat {secrets / 'redis.key'})", "")
    with subprocess.Popen([server, str(secrets / "redis.conf"), *more]) as process:
        try:
            wait = f"for _ in $(seq 100); do [ -S {socket} ] && break; sleep 0.05; done; "
            assert subprocess.run(["sh", "-c", wait + asked], timeout=20).returncode == 0
            assert subprocess.run(["sh", "-c", open_to_all], timeout=20).returncode != 0
        finally:
            process.terminate()


def test_what_is_mounted_lies_there() -> None:
    for service in compose()["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("./") and source not in OF_THE_USER:
                assert (DEPLOY / source).exists(), source
            elif not source.startswith(("/", ".")):
                assert source in compose()["volumes"]


def test_prometheus_asks_the_port_of_the_metrics_and_grafana_asks_prometheus() -> None:
    _, server = settings(compose_command())
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == f"lora-serve:{server.metrics_port}"
    for rules in config["rule_files"]:
        assert (DEPLOY / "prometheus" / rules).is_file()
    provisioned = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioned / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioned / "dashboards" / "lora-serve.yaml").read_text())[
        "providers"
    ]
    grafana = compose()["services"]["grafana"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(provider["options"]["path"] + "/")
    assert f"./grafana/lora-serve.json:{home}:ro" in grafana["volumes"]


# What tenants need. A new route is passed when it stands here and in nginx.conf.
PASSED = {
    "/v1/completions",
    "/v1/completions/render",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/requests",
    "/v1/responses",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/responses/{response_id}/input_items",
}


def passes(path: str) -> bool:
    """Whether the gateway hands the path on: by a pattern, and nothing else."""
    config = (DEPLOY / "nginx.conf").read_text()
    everything, *locations = re.findall(r"location (.*) \{ (.*); \}", config)
    assert everything == ("/", "return 404")
    assert len(locations) + 1 == config.count("location ")
    patterns = [where.removeprefix("~ ") for where, what in locations]
    assert {what for _, what in locations} == {"proxy_pass http://lora-serve:8000"}
    assert all(where.startswith("~ ^/v1/") for where, _ in locations)
    return any(re.search(pattern, path) for pattern in patterns)


def test_the_gateway_passes_what_tenants_use_and_no_other_route() -> None:
    passed = {each.path for each in OPERATIONS if passes(re.sub(r"\{.*?\}", "tenant-a", each.path))}
    assert passed == PASSED
    assert all(each.access is Access.KEY for each in OPERATIONS if each.path in PASSED)
    for path in ("/v1/loras/", "/v1/models_of_others", "/v1/completions/x", "/x/v1/models"):
        assert not passes(path)
