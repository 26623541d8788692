"""The admission server: `python -m gpushare_operator.admission`.

It answers AdmissionReview v1 at /mutate and /validate over HTTPS, by `gpushare.core.admission.review`. It keeps
no state of its own, so any number of replicas serve side by side; what it watches in the cluster only sharpens
its answers.
"""

from gpushare_operator.admission.review import review
from gpushare_operator.admission.server import AdmissionServerSettings, make_app, serve

__all__ = ["AdmissionServerSettings", "make_app", "review", "serve"]
