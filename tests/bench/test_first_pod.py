"""`python -m bench first-pod` times the commands of the guide and no others."""

import yaml
from bench import first_pod


def test_it_runs_the_pages_commands_in_their_order() -> None:
    images = {"image": "localhost/own:dev-1", "scheduler": "localhost/scheduler:v1"}
    install, tested, apply, until, pods, explain = first_pod.commands(images)
    assert install[0] == (
        "helm install gpushare helm/gpushare --namespace gpushare-system --create-namespace --wait"
        " --set image.repository=localhost/own --set simulated.gpus=H200:2"
        " --set image.tag=dev-1 --set scheduler.image.repository=localhost/scheduler --set scheduler.image.tag=v1"
    )
    assert tested[0] == "helm test gpushare --namespace gpushare-system"
    pod = yaml.safe_load(apply[1])
    assert apply[0] == "kubectl apply -f -"
    assert pod["metadata"]["annotations"] == {"gpushare.io/fraction": "0.25"}
    assert pod["spec"]["containers"][0]["image"] == "localhost/own:dev-1"
    assert pod["metadata"]["name"] in until[0]
    assert (pods[0], explain[0]) == ("kubectl gpushare pods", "kubectl gpushare explain simulated")


def test_the_first_hours_image_is_built_and_pushed_by_its_own_commands() -> None:
    build, push = first_pod.image_commands("127.0.0.1:5000/gpushare:0.1.0", "--build-arg BASE_IMAGE=base")
    assert build == "docker build --build-arg BASE_IMAGE=base -t 127.0.0.1:5000/gpushare:0.1.0 ."
    assert push == "docker push 127.0.0.1:5000/gpushare:0.1.0"
