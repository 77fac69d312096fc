"""The files of deploy: YAML and JSON are valid, and what they name exists."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rjax.replicas.gateway_metrics import GatewayMetrics
from rjax.serve.config.http_options import HEALTH_PATHS
from rjax.serve.config.route_paths import ROUTE_PATHS
from tests.docs.generated import exposition
from tests.docs.pages import ROOT
from tests.docs.shell_commands import check_arguments

DEPLOY = ROOT / "deploy"
USER = 10001
DRAIN_SECONDS = 30


def documents(name: str) -> list[Any]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    pairs = [line.split(maxsplit=1) for line in lines]
    return [(word, " ".join(rest.split())) for word, rest in pairs]


def last(word: str) -> str:
    """The arguments of the last instruction of a kind."""
    return [rest for other, rest in instructions() if other == word][-1]


def manifest(kind: str) -> dict[str, Any]:
    """The object of a kind in the Kubernetes manifest."""
    (found,) = [each for each in documents("kubernetes.yaml") if each["kind"] == kind]
    return found


def container() -> dict[str, Any]:
    """The container of the Kubernetes deployment."""
    (found,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def series() -> set[str]:
    """The names of all series of /metrics, labels left out."""
    names = re.findall(r"^(rjax:\w+)[{ ]", exposition(), flags=re.MULTILINE)
    return set(names)


def test_every_file_is_valid():
    paths = [path for path in DEPLOY.rglob("*") if path.suffix in (".yaml", ".yml")]
    assert len(paths) == 5
    for path in paths:
        assert all(documents(str(path.relative_to(DEPLOY))))


def test_the_image():
    known = {"ARG", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN"}
    known |= {"STOPSIGNAL", "USER", "VOLUME", "WORKDIR"}
    assert {word for word, _ in instructions()} <= known
    assert int(last("USER")) == USER
    assert f"--uid {USER}" in next(rest for word, rest in instructions() if "useradd" in rest)
    for word, rest in instructions():
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    assert any(path in last("HEALTHCHECK") for path in HEALTH_PATHS)
    check = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    compile(check[-1], "HEALTHCHECK", "exec")


def test_the_extras_of_the_image_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    default = last("ARG").partition("=")[2]
    (named,) = re.findall(r'"\.\[([^]]+)\]"', " ".join(rest for _, rest in instructions()))
    assert set(named.replace("${CUDA}", default).split(",")) <= extras.keys()


def test_the_build_context_has_what_the_image_copies():
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for word, rest in instructions():
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert f"!{source}" in kept


@pytest.mark.parametrize("place", ["image", "compose", "kubernetes"])
def test_the_server_takes_the_arguments(place, monkeypatch):
    words = json.loads(last("ENTRYPOINT"))
    if place == "compose":
        words += [re.sub(r"\$\{.*\}", "llama", word) for word in compose("rjax")["command"]]
    if place == "kubernetes":
        words += container()["args"]
    check_arguments(words, monkeypatch)
    assert shlex.join(words).startswith("rjax serve --host 0.0.0.0")


def compose(service: str) -> dict[str, Any]:
    """A service of the compose file."""
    return documents("compose.yaml")[0]["services"][service]


def test_the_compose_file():
    (whole,) = documents("compose.yaml")
    for service in whole["services"].values():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:")
        for mounted in service["volumes"]:
            source = mounted.split(":")[0]
            assert source in whole["volumes"] or (DEPLOY / source).exists(), source
        assert set(service.get("secrets", [])) <= whole["secrets"].keys()
    (device,) = compose("rjax")["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert int(compose("rjax")["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS


def test_prometheus_scrapes_the_server():
    (scrape,) = documents("prometheus.yml")[0]["scrape_configs"]
    assert scrape["metrics_path"] in ROUTE_PATHS
    assert scrape["static_configs"] == [{"targets": ["rjax:8000"]}]
    secret = Path(scrape["authorization"]["credentials_file"]).name
    assert secret in compose("prometheus")["secrets"]


def test_the_dashboard_shows_metrics_that_exist():
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "rjax.json").read_text("utf-8"))
    expressions = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    queries = [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    named = {name for text in expressions + queries for name in re.findall(r"rjax:\w+", text)}
    assert named <= series()
    assert "rjax:kv_token_reads_saved_total" in named
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for text in expressions:
        assert text.count("(") == text.count(")")
        assert text.count("{") == text.count("}")


def test_queries_of_the_pages_name_metrics_that_exist():
    of_gateway = GatewayMetrics("m").exposition(1).decode()
    existing = series() | set(re.findall(r"^(rjax:\w+)\{", of_gateway, re.MULTILINE))
    for page in (ROOT / "docs").rglob("*.md"):
        named = set(re.findall(r"rjax:\w+", page.read_text(encoding="utf-8")))
        families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in existing}
        assert named <= existing | families, page


def test_the_panels_do_not_overlap():
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "rjax.json").read_text("utf-8"))
    cells = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        taken = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells
        assert at["x"] + at["w"] <= 24
        cells |= taken


def test_the_kubernetes_manifest():
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    (port,) = container()["ports"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        found = container()[probe]["httpGet"]
        assert found["path"] in HEALTH_PATHS
        assert found["port"] == port["name"]
    assert pod["securityContext"]["runAsUser"] == USER
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == 1
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    (shared,) = [name for name, path in mounts.items() if path == "/dev/shm"]
    assert volumes[shared]["emptyDir"]["medium"] == "Memory"
    assert mounts["cache"] == last("VOLUME")
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest("PersistentVolumeClaim")["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] > DRAIN_SECONDS
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Service")["spec"]["selector"] == labels
    (out,) = manifest("Service")["spec"]["ports"]
    assert out["targetPort"] == port["name"]
