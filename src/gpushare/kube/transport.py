"""The Kubernetes package's configuration and REST transport, without its generated clients and models.

Importing them runs the parent packages' `__init__`, which load a synchronous and an asynchronous client of every
API with pydantic, requests and OAuth: 330 modules and 19 MB resident that our code never calls. So the parent
packages are put into sys.modules without running their code, unless another library (Kopf) has imported them
already. If that fails with a release of the package, it is imported as usual.
"""

import importlib
import importlib.util
import sys
import types
from typing import Any, Final

_PACKAGES: Final = ("kubernetes", "kubernetes.aio", "kubernetes.aio.client")


def _import_transport() -> tuple[Any, Any, Any]:
    """Return the configuration module, and the classes of a configuration and of a REST client."""
    import kubernetes.aio.config  # noqa: PLC0415 - what is in sys.modules by now decides how much is loaded
    from kubernetes.aio.client import Configuration  # noqa: PLC0415
    from kubernetes.aio.client.rest import RESTClientObject  # noqa: PLC0415

    return kubernetes.aio.config, Configuration, RESTClientObject


def _enter_bare(name: str) -> None:
    """Put a package into sys.modules with its path, without running its code."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(name)
    bare = types.ModuleType(name)
    bare.__spec__, bare.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules[name] = bare
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, bare)


def load_transport(packages: tuple[str, ...] = _PACKAGES) -> tuple[Any, Any, Any]:
    """Return the result of `_import_transport`, without loading clients and models if possible.

    Args:
        packages: packages whose `__init__` is not run, parents first.
    """
    if packages[0] in sys.modules:
        return _import_transport()
    try:
        for name in packages:
            _enter_bare(name)
        client: Any = sys.modules[packages[-1]]
        client.ApiClient = object  # named by a function that is never called
        client.Configuration = importlib.import_module(f"{packages[-1]}.configuration").Configuration
        return _import_transport()
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == packages[0]]:
            del sys.modules[name]
        return _import_transport()


kube_config, Configuration, RESTClientObject = load_transport()
