"""What deploy/ names exists and fits: settings, commands, ports, certificates; and the linters have no complaint."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import tinkex
from tests import tools
from tinkex.cli.parser import build_parser
from tinkex.errors import ConfigError
from tinkex.server.routes import health
from tinkex.server.tls import certificates
from tinkex.server.tls.contexts import server_context
from tinkex.settings import SERVE, ServeConfig, check_cluster, resolve_serve
from tinkex.settings.serve import BUCKET_VARIABLES, CREDENTIALS_FILE, bucket_access

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "tinkex"
TEMPLATES = sorted((CHART / "templates").iterdir())
MOUNTED = "/run/secrets/"
VARIABLES = {setting.variable for setting in SERVE} | {"TINKEX_CONFIG"}
OF_BUCKET = {name for names in BUCKET_VARIABLES.values() for name in names} | {CREDENTIALS_FILE}
KUBERNETES = ("1.29", "1.36")


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


SERVERS = {name: service for name, service in compose()["services"].items() if service["image"].startswith("tinkex")}


def image() -> dict[str, str]:
    """The variables that the Dockerfile sets."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    [line] = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    return dict(pair.split("=") for pair in line.split())


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make-secrets` makes."""
    folder = tmp_path_factory.mktemp("deploy") / "secrets"
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    for _ in range(2):  # what is there stays
        done = subprocess.run(
            [DEPLOY / "make-secrets", folder], env={"PATH": path}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    return folder


def environment(name: str, secrets: Path) -> dict[str, str]:
    """The environment of a server of the Compose file, with its secrets where they are here."""
    given = {**image(), **SERVERS[name]["environment"]}
    mounted: dict[str, Path] = {}
    for secret in SERVERS[name]["secrets"]:
        source, target = (secret, secret) if isinstance(secret, str) else (secret["source"], secret["target"])
        file = compose()["secrets"][source]["file"]
        mounted[MOUNTED + target] = secrets / Path(file).relative_to("secrets")
    wanted = {value for value in given.values() if value.startswith(MOUNTED)}
    assert wanted == mounted.keys(), "every secret that is mounted is used, and the other way round"
    without_defaults = {key: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", str(value)) for key, value in given.items()}
    return {key: str(mounted.get(value, value)) for key, value in without_defaults.items()}


def config_of(name: str, secrets: Path) -> ServeConfig:
    return resolve_serve(environment(name, secrets))


def test_secrets_are_for_their_owner_alone_and_complete(secrets: Path) -> None:
    files = [file for file in secrets.rglob("*") if file.is_file()]
    assert not [file for file in files if file.stat().st_mode & 0o077 and file.suffix != ".crt"]
    named = {Path(secret["file"]).relative_to("secrets") for secret in compose()["secrets"].values()}
    assert named <= {file.relative_to(secrets) for file in files}
    password = (secrets / "database-password").read_text().strip()
    assert len(password) >= 32 and f":{password}@postgres/" in (secrets / "database-url").read_text()


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_of_the_compose_file_would_start(name: str, secrets: Path) -> None:
    given = environment(name, secrets)
    assert given.keys() <= VARIABLES | OF_BUCKET
    config = config_of(name, secrets)
    check_cluster(config)
    assert config.is_clustered and config.api_keys and config.database_url.startswith("postgresql://tinkex:")
    assert config.cluster_ca is not None and config.port == 8642 and config.host == "0.0.0.0"
    if config.node_url is None:
        assert config.no_engine and "depends_on" in SERVERS[name] and not given.keys() & OF_BUCKET
    else:
        assert server_context(config) is not None, "the other servers accept its certificate"
        assert config.node_url == f"https://{name}:8642" and config.blobs == "s3://tinkex/cluster"
        [user] = json.loads((secrets / "bucket-users.json").read_text())["identities"]
        access = bucket_access(given)
        assert user["credentials"] == [{"accessKey": access["access_key_id"], "secretKey": access["secret_access_key"]}]
        assert all(action.endswith(":tinkex") for action in user["actions"])
        assert config.proofs, "a sampler compares what those that train have saved"


def test_all_servers_of_the_compose_file_share_what_they_must(secrets: Path) -> None:
    configs = [config_of(name, secrets) for name in SERVERS]
    for shared in ("database_url", "cluster_secret", "cluster_ca", "api_keys", "node_lease_s"):
        assert len({getattr(config, shared) for config in configs}) == 1, shared
    assert sorted(bool(config.no_engine) for config in configs) == [False, False, False, True, True]


def test_the_sampler_of_the_compose_file_samples_with_vllm_and_trains_nothing(secrets: Path) -> None:
    config, service = config_of("sampler", secrets), SERVERS["sampler"]
    assert config.samples_only and config.sampler == "vllm" and service["profiles"] == ["gpu"]
    target, dockerfile = service["build"]["target"], (DEPLOY / "Dockerfile").read_text()
    stage = dockerfile.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
    assert config.vllm_python is not None
    assert f"{config.vllm_python.parent}/pip install" in stage and 'VLLM="vllm==' in stage
    assert all(requirement in stage for requirement in tools.VLLM_EXTRAS)
    assert dockerfile.rstrip().endswith("FROM server"), "what is built without a target"


def test_health_checks_are_programs_and_ask_for_what_there_is() -> None:
    paths = {route.path for route in health.ROUTES}
    for service in SERVERS.values():
        kind, python, flag, program = service["healthcheck"]["test"]
        assert (kind, python, flag) == ("CMD", "python", "-c") and ast.parse(program)
        assert [path for path in paths if path in program] == ["/readyz"]
    for template in TEMPLATES:
        assert set(re.findall(r"httpGet: \{path: ([^,]+),", template.read_text())) <= paths


def test_ports_are_the_images(secrets: Path) -> None:
    assert image()["TINKEX_PORT"] == "8642"
    assert re.findall(r"^EXPOSE (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE) == ["8642"]
    published = [port for service in SERVERS.values() for port in service.get("ports", [])]
    assert published == ["127.0.0.1:8642:8642", "127.0.0.1:8643:8642"]
    chart = "".join(template.read_text() for template in TEMPLATES)
    assert set(re.findall(r"(?:containerPort|port): \"?(\d+)|:(\d+)$", chart, re.MULTILINE)) == {
        ("8642", ""),
        ("", "8642"),
    }


def test_every_setting_that_the_chart_and_the_image_name_exists() -> None:
    for file in (*TEMPLATES, CHART / "values.yaml", DEPLOY / "Dockerfile", DEPLOY / "README.md"):
        named = set(re.findall(r"\bTINKEX_[A-Z_]+\b", file.read_text()))
        assert named <= VARIABLES, f"{file.name}: {named - VARIABLES}"
        used = set(re.findall(r"\bAWS_[A-Z_]+\b", file.read_text()))
        assert used <= OF_BUCKET, f"{file.name}: {used - OF_BUCKET}"


def commands() -> Iterator[tuple[str, list[str]]]:
    for file in (*TEMPLATES, DEPLOY / "README.md", DEPLOY / "make-secrets"):
        for line in re.findall(r"(?:^ *|exec \w+ |- )(tinkex [a-z].*)$", file.read_text(), re.MULTILINE):
            text = re.sub(r"\{\{.*?\}\}", "1", line.partition("||")[0])
            yield file.name, [word.strip("'\"") for word in text.split()[1:]]


def test_every_command_exists() -> None:
    found = list(commands())
    assert {name for name, _ in found} == {"nodes.yaml", "README.md", "make-secrets"}
    for name, words in found:
        assert build_parser(words).parse_args(words).run is not None, (name, words)
    assert 'ENTRYPOINT ["tinkex"]' in (DEPLOY / "Dockerfile").read_text()


def test_the_image_copies_and_installs_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for word in line.split()}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent and all((ROOT / name).exists() for name in copied)
    extras = re.findall(r"\$1\[(.*?)\]", text)[0].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(extras) <= project["project"]["optional-dependencies"].keys()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == tinkex.__version__


def test_the_certificate_that_the_readme_makes_is_for_the_names_that_the_chart_gives(tmp_path: Path) -> None:
    text = (CHART / "templates" / "nodes.yaml").read_text()
    [address] = re.findall(r"://(\$\(POD_NAME\).*):8642$", text, re.MULTILINE)
    host = address.replace("$(POD_NAME)", "tinkex-nodes-0").replace("$(POD_NAMESPACE)", "default")
    host = host.replace("{{ .Release.Name }}", "tinkex")
    readme = (DEPLOY / "README.md").read_text()
    [name] = re.findall(r"cluster cert certs --name '(.*)'", readme)
    files = certificates.issue(tmp_path, certificates.open_authority(tmp_path), (name,), 1)
    assert files.cert.name in readme and files.key.name in readme
    node = ServeConfig(
        node_url=f"https://{host}:8642", node_cert=files.cert, node_key=files.key, cluster_ca=tmp_path / "ca.crt"
    )
    assert server_context(node) is not None
    with pytest.raises(ConfigError, match="for another name"):
        server_context(replace(node, node_url=f"https://{host}.other:8642"))


# ── Their own linters


def lint(tool: str, command: str, *words: str | Path, given: str | None = None) -> str:
    """Run a tool from PyPI in an environment of its own; what it prints."""
    program = tools.make(tool).with_name(command)
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=120, input=given, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "values", [(), ("tlsSecret=", "bucket.credentialsSecret=", "hasKeysFile=false", "extraEnv.TINKEX_LOG_LEVEL=debug")]
)
def test_helm_and_the_schemas_of_kubernetes_accept_the_chart(values: tuple[str, ...], tmp_path: Path) -> None:
    chosen = [word for value in values for word in ("--set", value)]
    assert "0 chart(s) failed" in lint("helm", "helm", "lint", "--strict", CHART, *chosen)
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(lint("helm", "helm", "template", "some", CHART, *chosen))
    kinds = [document["kind"] for document in yaml.safe_load_all(rendered.read_text())]
    expected = ["Deployment", "PodDisruptionBudget", "PodDisruptionBudget", "Service", "Service", "StatefulSet"]
    assert sorted(kinds) == expected
    for version in KUBERNETES:
        lint("kubernetes-validate", "kubernetes-validate", "-k", version, "--strict", rendered)
    named = set(re.findall(r"\bTINKEX_[A-Z_]+\b", rendered.read_text()))
    assert named <= VARIABLES and ("TINKEX_NODE_CERT" in named) is (not values)


@pytest.mark.full
def test_hadolint_and_yamllint_have_no_complaint() -> None:
    lint("hadolint", "hadolint", DEPLOY / "Dockerfile")
    braces, comments = "{max-spaces-inside: 1}", "{min-spaces-from-content: 1}"
    changed = f"line-length: {{max: 120}}, document-start: disable, braces: {braces}, comments: {comments}"
    rules = f"{{extends: default, rules: {{{changed}}}}}"
    lint(
        "yamllint",
        "yamllint",
        "--strict",
        "-d",
        rules,
        DEPLOY / "compose.yaml",
        CHART / "values.yaml",
        CHART / "Chart.yaml",
    )
