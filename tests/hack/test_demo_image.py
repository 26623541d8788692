"""`make demo` on a machine that has nothing yet: the image is built beside the cluster's programs."""

import threading

import pytest
from devcluster import backends, demo, image, tools
from devcluster.local import LocalCluster
from devcluster.progress import Failed


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.os, "geteuid", lambda: 0)
    monkeypatch.setattr(tools, "install_packages", lambda: None)
    monkeypatch.setattr(backends, "docker_answers", lambda: False)


@pytest.mark.usefixtures("root")
def test_the_image_is_built_while_the_cluster_comes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    began, cluster_is_up = threading.Event(), threading.Event()

    def build(*, docker: bool) -> None:
        assert not docker
        began.set()
        assert cluster_is_up.wait(30), "the cluster waited for the image"

    monkeypatch.setattr(image, "build", build)
    with demo.image_meanwhile(LocalCluster()):
        assert began.wait(30)
        cluster_is_up.set()


@pytest.mark.usefixtures("root")
def test_an_image_that_cannot_be_built_ends_the_demo_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*, docker: bool) -> None:
        raise Failed(f"no base image, docker {docker}")

    monkeypatch.setattr(image, "build", build)
    with pytest.raises(Failed, match="no base image"), demo.image_meanwhile(LocalCluster()):
        pass


def test_without_root_and_on_other_clusters_nothing_is_built_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*, docker: bool) -> None:
        raise AssertionError(f"built, docker {docker}")

    monkeypatch.setattr(image, "build", build)
    monkeypatch.setattr(demo.os, "geteuid", lambda: 1001)
    with demo.image_meanwhile(LocalCluster()):
        pass
    with demo.image_meanwhile(backends.ExistingCluster()):
        pass
