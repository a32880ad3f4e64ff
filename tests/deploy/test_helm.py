"""The Helm chart: linted and rendered by Helm itself, every object checked against Kubernetes' schemas, no cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from decode_svc.app import DECODE_SERVICE
from prefill_svc.app import PREFILL_SERVICE
from router.main import INFERENCE
from tests.deploy.helm import CHART
from tests.deploy.test_containers import ROOT

EVERYTHING = {
    "model": {"servedName": "llama", "volume": {"hostPath": {"path": "/srv/model"}}},
    "router": {"args": ["--policy", "load"], "hpa": {"enabled": True}, "service": {"annotations": {"a": "b"}}},
    "prefill": {"hpa": {"enabled": True}, "sharedMemory": "1Gi", "nodeSelector": {"pool": "gpu"}},
    "decode": {"hpa": {"enabled": True}, "tolerations": [{"operator": "Exists"}], "args": ["--max-num-seqs=8"]},
    "images": {"pullSecrets": [{"name": "registry"}]},
    "tls": {"secretName": "certificates"},
    "auth": {"tokenSecretName": "tokens"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "shop"}}}]},
    "tracing": {"endpoint": "http://collector:4317"},
}
BARE = {
    "valkey": {"enabled": False},
    "redisUrl": "rediss://index.example:6380/0",
    "router": {"http": False},
    "networkPolicy": {"enabled": False},
}
VARIANTS = {"default": {}, "everything": EVERYTHING, "bare": BARE}


def helm(command: str, values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "tests.deploy.helm", command, json.dumps(values)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=ROOT)


@cache
def rendered(variant: str) -> dict[str, Any]:
    """Objects by "Kind/name"."""
    done = helm("render", VARIANTS[variant])
    assert done.returncode == 0, done.stderr
    files = {name: text for name, text in json.loads(done.stdout).items() if name.endswith(".yaml")}
    objects = [each for text in files.values() for each in yaml.safe_load_all(text) if each is not None]
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}


def pods(objects: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(component, pod template) of router and workers."""
    for each in objects.values():
        if each["kind"] in ("Deployment", "StatefulSet"):
            component = each["metadata"]["labels"]["app.kubernetes.io/component"]
            if component != "valkey":
                yield component, each["spec"]["template"]


def test_lint() -> None:
    found = json.loads(helm("lint", {}).stdout)
    assert found["total_charts_linted"] == 1
    # 1 is information: a chart may do without an icon.
    assert [message for message in found["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize(
    ("variant", "version"), [("default", "1.37"), ("everything", "1.37"), ("bare", "1.37"), ("everything", "1.30")]
)
def test_every_object_is_one_that_kubernetes_knows(variant: str, version: str) -> None:
    kinds = set()
    for each in rendered(variant).values():
        if each["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # a custom resource
        kubernetes_validate.validate(each, version, strict=True)
        kinds.add(each["kind"])
    assert {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget"} <= kinds
    assert ("HorizontalPodAutoscaler" in kinds) == (variant == "everything")
    assert ("NetworkPolicy" in kinds) == (variant != "bare")


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_find_their_pods_and_ports(variant: str) -> None:
    objects = rendered(variant)
    of_component = dict(pods(objects))
    assert set(of_component) == {"router", "prefill", "decode"}
    for name, each in objects.items():
        spec = each["spec"]
        component = each["metadata"]["labels"].get("app.kubernetes.io/component")
        if component not in of_component:
            continue
        selector = spec.get("selector") or spec.get("podSelector")
        labels = of_component[component]["metadata"]["labels"]
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert wanted.items() <= labels.items(), name
        (container,) = of_component[component]["spec"]["containers"]
        named = {port["name"] for port in container["ports"]}
        used = {port.get("targetPort") for port in spec.get("ports", ())}
        used |= {port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]}
        assert used <= named, name
    for role in ("prefill", "decode"):
        service = objects[f"Service/demo-pagewire-{role}"]["spec"]
        assert service["clusterIP"] == "None"
        assert service["ports"][0]["appProtocol"] == "grpc"
        assert objects[f"StatefulSet/demo-pagewire-{role}"]["spec"]["serviceName"] == f"demo-pagewire-{role}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_drain_are_probed_by_service_and_hardened(variant: str) -> None:
    services = {"router": INFERENCE, "prefill": PREFILL_SERVICE, "decode": DECODE_SERVICE}
    for component, pod in pods(rendered(variant)):
        spec = pod["spec"]
        (container,) = spec["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        wait = container["lifecycle"]["preStop"]["sleep"]["seconds"] if component == "router" else 0
        assert spec["terminationGracePeriodSeconds"] > float(env["PAGEWIRE_DRAIN_TIMEOUT"]) + wait
        for probe, service in (("readinessProbe", services[component]), ("livenessProbe", ""), ("startupProbe", "")):
            if variant == "everything":
                assert container[probe]["exec"]["command"][-1] == service, "gRPC probes speak no TLS"
            else:
                port = next(port["containerPort"] for port in container["ports"] if port["name"] == "grpc")
                assert container[probe]["grpc"] == {"port": port, "service": service}
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert spec["automountServiceAccountToken"] is False
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_kv_has_a_port_that_only_workers_reach() -> None:
    objects = rendered("default")
    for component, pod in pods(objects):
        (container,) = pod["spec"]["containers"]
        env = {each["name"]: each.get("value") for each in container["env"]}
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        assert env.get("PAGEWIRE_KV_TRANSFER_PORT") == ports.get("kv")
        assert ("kv" in ports) == (component != "router")
        rules = objects[f"NetworkPolicy/demo-pagewire-{component}"]["spec"]["ingress"]
        peers = [peer for rule in rules if {"port": "kv"} in rule["ports"] for peer in rule["from"]]
        allowed = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in peers}
        assert allowed == (set() if component == "router" else {"prefill", "decode"})


@pytest.mark.parametrize("variant", ["everything", "bare"])
def test_pagewire_takes_the_command_and_environment(variant: str) -> None:
    for _, pod in pods(rendered(variant)):
        (container,) = pod["spec"]["containers"]
        env = {each["name"]: each.get("value", "pod-0") for each in container["env"]}
        for name, value in env.items():
            for other, text in env.items():
                env[name] = value = value.replace(f"$({other})", text)
        done = subprocess.run(
            [sys.executable, "-m", "pagewire", *container["args"], "--print-config"],
            capture_output=True, text=True, timeout=60, env=os.environ | env, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "drain_timeout = 120" in done.stdout
        assert ("redis_url" in done.stdout) is True
        assert ("otlp_traces_endpoint" in done.stdout) == (variant == "everything")


def test_the_autoscaler_counts_what_workers_expose() -> None:
    objects = rendered("everything")
    (metric,) = objects["HorizontalPodAutoscaler/demo-pagewire-decode"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert f'"{name.replace("vllm_", "vllm:")}"' in (ROOT / "pagewire/worker_metrics.py").read_text()
    assert "replicas" not in objects["StatefulSet/demo-pagewire-decode"]["spec"], "it is the autoscaler's"
    monitor = objects["ServiceMonitor/demo-pagewire"]["spec"]
    scraped = [name for name, each in objects.items() if each["kind"] == "Service"
               and monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()]  # fmt: skip
    assert len(scraped) == 3


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"decode": {"replica": 3}}, "replica"),
        ({"redisUrl": "http://x"}, "redisUrl"),
        ({"drainTimeoutSeconds": 0}, "drainTimeoutSeconds"),
        ({"model": {"volume": None}}, "volume"),
    ],
)
def test_the_schema_refuses_what_is_wrong(values: dict[str, Any], problem: str) -> None:
    done = helm("render", values)
    assert done.returncode == 1
    assert problem in done.stderr


def test_the_schema_describes_every_default() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def check(values: dict[str, Any], of: dict[str, Any], path: str) -> None:
        of = schema["$defs"][of["$ref"].rpartition("/")[2]] if "$ref" in of else of
        for name, value in values.items():
            if "properties" in of:
                assert name in of["properties"], f"{path}.{name}"
                if isinstance(value, dict):
                    check(value, of["properties"][name], f"{path}.{name}")

    check(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")
