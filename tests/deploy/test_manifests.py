"""deploy/kubernetes: Kubernetes' schemas judge pods and objects, octavo the arguments that it gets there."""

from pathlib import Path

import pytest
import yaml

from octavo.cli.main import make_parser
from octavo.cli.serve import configs
from octavo.ray.serve import build_app

kubernetes_validate = pytest.importorskip("kubernetes_validate")
FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
GIVEN_BY_LWS = {
    "$(LWS_GROUP_SIZE)": "2",
    "$(LWS_WORKER_INDEX)": "1",
    "$(LWS_LEADER_ADDRESS)": "octavo-0.octavo.default",
}


def objects(name):
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}


def check_pod(template):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, "1.27", strict=True)


def test_leader_worker_set():
    found = objects("leader-worker-set.yaml")
    for kind in ("Secret", "Service"):
        kubernetes_validate.validate(found[kind], "1.27", strict=True)
    group = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert set(group) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    both = []
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        check_pod(template)
        words = template["spec"]["containers"][0]["args"]
        for name, value in GIVEN_BY_LWS.items():
            words = [word.replace(name, value) for word in words]
        both.append(configs(make_parser("serve").parse_args(["serve", *words])))
    (leader, one), (worker, other) = both
    assert (one.headless, other.headless) == (False, True)
    assert leader == worker, "every node has the same options"
    assert (leader.nnodes, leader.tensor_parallel_size * leader.pipeline_parallel_size) == (group["size"], 16)


def test_a_manifest_with_a_fault_is_found():
    [container] = objects("leader-worker-set.yaml")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"][
        "leaderTemplate"
    ]["spec"]["containers"]
    with pytest.raises(kubernetes_validate.ValidationError):
        check_pod({"spec": {"containers": [container | {"args": "--headless"}]}})


@pytest.mark.filterwarnings("ignore")  # of Ray's
def test_ray_service():
    pytest.importorskip("ray")
    spec = objects("ray-service.yaml")["RayService"]["spec"]
    cluster = spec["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        check_pod(group["template"])
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert application["import_path"] == f"{build_app.__module__}:{build_app.__name__}"
    assert build_app(application["args"]) is not None, "all of its options exist"
