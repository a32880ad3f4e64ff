"""Dockerfiles, Compose, Prometheus and Grafana: linted, and what they name and run exists. (No daemon runs here.)"""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagewire import Client
from tests.chaos.system import System
from tests.e2e.cluster import READY

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
METRIC = re.compile(r"\b(?:vllm|pagewire):[a-z0-9_]+")


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=600, env=os.environ | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    return content


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint(path: Path) -> None:
    run(BIN / "hadolint", "--failure-threshold", "info", path)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_are_pinned_not_root_and_what_they_copy_exists(path: Path) -> None:
    text = path.read_text()
    for image in re.findall(r"^ARG \w+_IMAGE=(\S+)", text, re.MULTILINE):
        assert re.search(r":[\w-]*\d+\.\d+", image), f"{image} has no version"
    for source in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert source.startswith("${"), f"{source} is not pinned by an ARG"
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE) == ["10001:10001"]
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert any(source == each or source.startswith(f"{each}/") for each in allowed), f"{source} is ignored"


def test_compose_lint() -> None:
    run(BIN / "compose-lint", "--fail-on", "high", DEPLOY / "compose/compose.yaml", MODEL="/models")


@pytest.mark.parametrize("name", ["router", "prefill-0", "decode-1"])
def test_the_command_of_a_service_is_one_that_pagewire_takes(name: str) -> None:
    service = compose()["services"][name]
    dockerfile = (DEPLOY / ".." / service["build"]["dockerfile"]).read_text()
    environment = dict(re.findall(r"(PAGEWIRE_\w+)=(\S+)", dockerfile))
    command = (sys.executable, "-m", "pagewire", *service["command"], "--print-config")
    config = run(*command, **environment, PYTHONPATH=str(ROOT))
    assert 'host = "0.0.0.0"' in config
    assert "metrics_port = 9090" in config
    assert service["read_only"] is True
    assert float(service["stop_grace_period"].removesuffix("s")) > float(config.split("drain_timeout = ")[1].split()[0])
    if name != "router":
        assert service["hostname"] == service["command"][service["command"].index("--advertise") + 1] == name


def test_names_and_ports_fit_together() -> None:
    services = compose()["services"]
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"]
    targets = [target for job in jobs for config in job.get("static_configs", ()) for target in config["targets"]]
    targets += [f"{name}:{config['port']}" for job in jobs for config in job.get("dns_sd_configs", ())
                for name in config["names"]]  # fmt: skip
    workers = {name for name in services if name.startswith(("prefill", "decode"))}
    assert set(targets) == {f"{name}:9090" for name in {*workers, "router"}}
    clusters = yaml.safe_load((DEPLOY / "envoy/envoy.yaml").read_text())["static_resources"]["clusters"]
    upstreams = [
        (address["address"], address["port_value"])
        for cluster in clusters
        for group in cluster["load_assignment"]["endpoints"]
        for endpoint in group["lb_endpoints"]
        for address in [endpoint["endpoint"]["address"]["socket_address"]]
    ]
    assert upstreams == [("router", 50051), ("router", 8000)]
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    used = {panel["datasource"]["uid"] for panel in dashboard()["panels"] if "datasource" in panel}
    assert used == {source["uid"]}


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboards/pagewire.json").read_text())
    return content


def exposed(*ports: int) -> set[str]:
    """Names of the samples that processes can have, whether they have one already or not."""
    names = set()
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", response.read().decode(), re.MULTILINE):
                names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names


def test_every_metric_of_the_dashboard_exists_in_a_running_system(shared_system: System) -> None:
    with Client(shared_system["r0"].endpoint) as client:
        client.complete("The capital of France is", max_tokens=4)
    roles = {"router": "r0", "prefill": "p0", "decode": "d0"}
    of_role = {role: exposed(shared_system[name].metrics_port) for role, name in roles.items()}
    num_names = 0
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            jobs = re.search(r'job=~?"([a-z|]+)"', target["expr"])
            wanted = jobs[1].split("|") if jobs else list(of_role)
            for name in METRIC.findall(target["expr"]):
                num_names += 1
                found = [role for role in wanted if name in of_role[role]]
                assert found == wanted if jobs else found, f"{panel['title']}: {name} is not exposed by {wanted}"
    assert num_names > 30


def install(directory: Path, dockerfile: str, extras: str) -> Path:
    """A clean virtual environment with just what the image's build stage copies; returns its `bin`."""
    source = directory / "src"
    source.mkdir()
    text = (DEPLOY / "docker" / dockerfile).read_text()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in sources.split():
            ignore = shutil.ignore_patterns("__pycache__", "*.so", "build")
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=ignore)
            else:
                shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "venv", directory / "venv")
    pip = (directory / "venv/bin/pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile")
    run(*pip, "-c", source / "constraints.txt", f"{source}[{extras}]")
    return directory / "venv/bin"


@pytest.mark.nightly
@pytest.mark.timeout(700)
def test_a_router_without_torch_serves(tmp_path: Path, shared_system: System) -> None:
    """What the router's image holds: it installs without torch, starts, answers its health check, drains."""
    bin_ = install(tmp_path, "router.Dockerfile", "router,auth,otel")
    python = (bin_ / "python", "-c")
    # Without the checkout on the path: it must run from what was installed.
    clean = {"PYTHONPATH": "", "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    absent = "import importlib.util as u; print([n for n in ('torch', 'transformers', 'triton') if u.find_spec(n)])"
    assert run(*python, absent, **clean) == "[]\n"
    workers = [
        f"--{role}-workers={shared_system[name].endpoint}" for role, name in (("prefill", "p0"), ("decode", "d0"))
    ]
    command = [str(bin_ / "pagewire"), "router", "--model", str(shared_system.model), "--port", "0", *workers]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | clean, cwd=tmp_path)
    try:
        assert process.stdout is not None
        found = READY.search(process.stdout.readline())
        assert found is not None
        assert run(bin_ / "pagewire", "health", "--target", found[1], **clean) == "SERVING\n"
    finally:
        process.terminate()
        assert process.wait(30) == 0
        process.stdout.close()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_worker_image_installs(tmp_path: Path) -> None:
    bin_ = install(tmp_path, "worker.Dockerfile", "worker,auth,otel")
    assert "--advertise" in run(bin_ / "pagewire", "decode", "--help", PYTHONPATH="")
