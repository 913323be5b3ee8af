"""What is shipped to run the service with is taken by the tools that will read it, as far as those need no engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from api.config_sources import from_environment, read_file, resolve
from orchestrator.domain.errors import Refused

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
KUBERNETES = "1.31"


def manifests(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()) if one]


def containers(of: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = of["spec"]["template"]["spec"]["containers"]
    return found


def variables(of: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "x") for one in of.get("env", ())}


def test_manifests_are_what_the_api_server_takes() -> None:
    found = manifests("everstep.yaml")
    for one in found:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    replicas = {
        one["metadata"]["name"]: one["spec"]["replicas"] for one in found if one["kind"] in ("Deployment", "StatefulSet")
    }
    assert replicas == {"everstep-api": 2, "everstep-supervisor": 2, "everstep-redis": 1}


def test_pods_of_the_ray_cluster_are_pods() -> None:
    """KubeRay's own schema is in no package; what it makes pods of is checked."""
    (cluster,) = manifests("ray-cluster.yaml")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        for one in group["template"]["spec"]["containers"]:
            assert variables(one)["RAY_AUTH_MODE"] == "token"


def test_configurations_that_are_shipped_are_ones(tmp_path: Path) -> None:
    assert resolve({}, {}, DEPLOY / "config.example.yaml").config.api.port == 8265
    (config,) = (one for one in manifests("everstep.yaml") if one["kind"] == "ConfigMap")
    (tmp_path / "config.yaml").write_text(config["data"]["config.yaml"])
    found = resolve({}, {}, tmp_path / "config.yaml").config
    services = {one["metadata"]["name"]: one for one in manifests("everstep.yaml") if one["kind"] == "Service"}
    assert found.redis.host in services and "everstep-api" in found.api.allowed_hosts
    for one in manifests("everstep.yaml"):
        for container in containers(one) if one["kind"] in ("Deployment", "StatefulSet") else ():
            from_environment(variables(container))  # refuses a name that is none
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
            volumes = {volume["name"] for volume in one["spec"]["template"]["spec"].get("volumes", ())}
            claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
            assert mounts <= volumes | claims
    for service in compose()["services"].values():
        from_environment({name: str(value) for name, value in service.get("environment", {}).items()})


def pods() -> Iterator[dict[str, Any]]:
    for one in manifests("everstep.yaml"):
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]["spec"]
    (cluster,) = manifests("ray-cluster.yaml")
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        yield group["template"]["spec"]


def test_kubernetes_puts_nothing_among_the_settings_and_opens_no_file_to_the_group() -> None:
    # What a pod is told of the service everstep-api, unless it is told nothing of services.
    with pytest.raises(Refused, match="there is no setting EVERSTEP_API_SERVICE_HOST"):
        from_environment({"EVERSTEP_API_SERVICE_HOST": "10.0.0.1", "EVERSTEP_API_PORT": "tcp://10.0.0.1:8265"})
    found = list(pods())
    assert len(found) == 5
    for pod in found:
        assert pod["enableServiceLinks"] is False
        if any(volume["name"] == "state" for volume in pod["volumes"]):
            # At every start otherwise, which makes admin.token one that others can read.
            assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_prometheus_shows_the_api_a_token() -> None:
    for name in ("prometheus.yml", "compose.yml"):
        scrapes = yaml.safe_load((DEPLOY / "prometheus" / name).read_text())["scrape_configs"]
        jobs = {one["job_name"]: one for one in scrapes}
        file = Path(jobs["everstep-api"]["authorization"]["credentials_file"])
        assert "authorization" not in jobs["everstep-supervisor"]
    assert file.name in compose()["services"]["prometheus"]["secrets"]
    assert "redis-password" not in compose()["services"]["prometheus"]["secrets"]
    for one in manifests("everstep.yaml"):
        if one["metadata"]["name"] == "everstep-api" and one["kind"] == "Deployment":
            assert "annotations" not in one["spec"]["template"]["metadata"], "by a pod's address, and without a token"


def test_secrets_of_the_compose_file_are_in_no_image_and_no_repository() -> None:
    for secret in compose()["secrets"].values():
        assert Path(secret["file"]).parts[0] == "secrets"
    root = DEPLOY.parent
    assert "deploy/secrets" in (root / ".dockerignore").read_text().split()
    assert "deploy/secrets/" in (root / ".gitignore").read_text().split()


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_the_compose_file_is_one_and_names_files_that_are_there() -> None:
    # Merge keys are resolved by YAML, before compose sees them.
    text = yaml.safe_dump({name: part for name, part in compose().items() if not name.startswith("x-")})
    parsed = compose_spec.PyCompose.from_yaml(text)
    assert parsed.name == "everstep" and parsed.get_service("supervisor-b") is not None
    for config in compose()["configs"].values():
        assert (DEPLOY / config["file"]).is_file(), config
    for name in ("datasource.yaml", "boards.yaml"):
        assert yaml.safe_load((DEPLOY / "grafana" / name).read_text())["apiVersion"] == 1
    published = [port for service in compose()["services"].values() for port in service.get("ports", ())]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_hadolint_finds_nothing_in_the_image() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    done = subprocess.run(
        [hadolint, "--failure-threshold", "info", str(DEPLOY / "Dockerfile")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in (DEPLOY / "systemd").glob("*.service"):
        # Nothing is installed where this runs; a program that is there stands in for ours.
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/everstep/bin/everstep", "/bin/true"))
    units = sorted(str(path) for path in tmp_path.glob("*.service"))
    assert len(units) == 2
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "everstep" in line]
    assert not said, said
    for unit in (DEPLOY / "systemd").glob("*.service"):
        # Strict leaves /tmp to be read only, where Ray and programs that are described write.
        assert {"PrivateTmp=yes", "ReadWritePaths=/tmp"} & set(unit.read_text().splitlines())
    redis = (DEPLOY / "systemd" / "redis-durable.conf").read_text()
    assert "appendonly yes" in redis and "appendfsync always" in redis


def test_the_redis_of_every_deployment_is_durable() -> None:
    commands = ["\n".join(compose()["services"]["redis"]["command"])]
    commands += [one["args"][0] for m in manifests("everstep.yaml") if m["kind"] == "StatefulSet" for one in containers(m)]
    assert len(commands) == 2
    for command in commands:
        for words in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction", "--requirepass"):
            assert words in command
    assert read_file(DEPLOY / "config.example.yaml")["redis"]["password_file"]
