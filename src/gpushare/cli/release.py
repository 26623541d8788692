"""What a release's ConfigMaps say that decisions depend on: its settings, and its interference models."""

from dataclasses import dataclass
from typing import Final

from gpushare.cli.access import SETTINGS_LABEL
from gpushare.kube import CONFIGMAPS, PODS, Api, Forbidden, Json, NotFound

SCHEDULER_SELECTOR: Final = "app.kubernetes.io/part-of=gpushare,app.kubernetes.io/component=scheduler"
MODELS_SELECTOR: Final = "app.kubernetes.io/part-of=gpushare,app.kubernetes.io/component=models"
_MODELS_VOLUME: Final = "models"


@dataclass(frozen=True, slots=True)
class ReleaseData:
    """The data of a release's ConfigMaps.

    Attributes:
        settings: None if there are none.
        models: text of each model artefact by its file's name; empty if the release has none, None if they may not
            be read.
    """

    settings: dict[str, str] | None
    models: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class ConfigMapNames:
    """The ConfigMaps that a pod of the scheduler uses; `models` is None if its release has none."""

    namespace: str
    settings: str
    models: str | None


async def read_release(api: Api) -> ReleaseData:
    """Read the release's settings and models.

    Who may not list every ConfigMap may get those that the scheduler's pods name (ClusterRole gpushare-explain).

    Raises:
        Forbidden: the settings may not be read.
    """
    try:
        settings = (await api.list(CONFIGMAPS, _data, label_selector=SETTINGS_LABEL)).items
        models = (await api.list(CONFIGMAPS, _data, label_selector=MODELS_SELECTOR)).items
    except Forbidden:
        return await _by_name(api)
    return ReleaseData(settings[0] if settings else None, models[0] if models else {})


def configmaps_named(pod: Json) -> ConfigMapNames | None:
    """Return the ConfigMaps of a release that a pod names; None if no ConfigMap is its environment."""
    spec = pod.get("spec") or {}
    models = [
        str(volume["configMap"]["name"])
        for volume in spec.get("volumes") or ()
        if volume.get("name") == _MODELS_VOLUME and "configMap" in volume
    ]
    for container in spec.get("containers") or ():
        for source in container.get("envFrom") or ():
            if name := (source.get("configMapRef") or {}).get("name"):
                return ConfigMapNames(
                    str(pod["metadata"].get("namespace")), str(name), models[0] if models else None
                )
    return None


async def _by_name(api: Api) -> ReleaseData:
    """Read the ConfigMaps that the scheduler's pods name."""
    pods = (await api.list(PODS, configmaps_named, label_selector=SCHEDULER_SELECTOR)).items
    for named in filter(None, pods):
        try:
            settings = _data(await api.get(CONFIGMAPS, named.settings, namespace=named.namespace))
        except NotFound:
            continue
        return ReleaseData(settings, await _models(api, named))
    return ReleaseData(None, {})


async def _models(api: Api, named: ConfigMapNames) -> dict[str, str] | None:
    """Return the artefacts of the release; None if they may not be read, as under an older chart's role."""
    if named.models is None:
        return {}
    try:
        return _data(await api.get(CONFIGMAPS, named.models, namespace=named.namespace))
    except NotFound:
        return {}
    except Forbidden:
        return None


def _data(obj: Json) -> dict[str, str]:
    return dict(obj.get("data") or {})
