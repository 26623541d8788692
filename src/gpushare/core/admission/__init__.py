"""Check and resolve a request (annotation over GpuShare over chart), find owners, word refusals."""

from gpushare.core.admission.label_terms import Term, terms_of_labels, ways_to_file
from gpushare.core.admission.ownership import (
    controller_of,
    guess_top_owner,
    may_have_owner,
    missing_owners,
    new_share,
    owners_of,
    pod_as_owner,
    references,
    share_name,
)
from gpushare.core.admission.resolve import AUTO_FRACTION, Defaults, Needs, resolve
from gpushare.core.admission.review import (
    DEFAULT_MAX_SELECTORS,
    AdmissionPolicy,
    Knowledge,
    check_gpushare,
    check_pod,
    check_workload,
    gpu_memories_mib,
    is_ours,
    mutate,
    pod_template,
    warnings,
)
from gpushare.core.admission.share_index import ShareIndex, ShareKey, rank

__all__ = [
    "AUTO_FRACTION",
    "DEFAULT_MAX_SELECTORS",
    "AdmissionPolicy",
    "Defaults",
    "Knowledge",
    "Needs",
    "ShareIndex",
    "ShareKey",
    "Term",
    "check_gpushare",
    "check_pod",
    "check_workload",
    "controller_of",
    "gpu_memories_mib",
    "guess_top_owner",
    "is_ours",
    "may_have_owner",
    "missing_owners",
    "mutate",
    "new_share",
    "owners_of",
    "pod_as_owner",
    "pod_template",
    "rank",
    "references",
    "resolve",
    "share_name",
    "terms_of_labels",
    "warnings",
    "ways_to_file",
]
