"""Decisions about requests that nothing is known of: short forms of `decide` and `survey` for tests."""

from collections.abc import Iterable

from gpushare.core.api import Rejection
from gpushare.core.placement import (
    Candidates,
    ClusterState,
    DecisionContext,
    Judge,
    NodeList,
    Placement,
    PlacementPolicy,
    PlacementRequest,
    decide,
    survey,
)
from gpushare.data import default_model


def context_of(state: ClusterState, policy: PlacementPolicy) -> DecisionContext:
    """A state and a policy, with the shipped model to judge by."""
    return DecisionContext(state, policy, Judge(default_model))


def place(request: PlacementRequest, state: ClusterState, policy: PlacementPolicy) -> Placement | Rejection:
    """The decision over all nodes."""
    return decide(request, context_of(state, policy))


def choose(
    request: PlacementRequest, state: ClusterState, policy: PlacementPolicy, node: str
) -> Placement | Rejection:
    """The decision on one node."""
    return decide(request, context_of(state, policy), node=node)


def candidates(
    request: PlacementRequest,
    state: ClusterState,
    policy: PlacementPolicy,
    node_names: Iterable[str] | NodeList | None = None,
) -> Candidates:
    """Where a request fits, and why not elsewhere."""
    return survey(request, context_of(state, policy), node_names)
