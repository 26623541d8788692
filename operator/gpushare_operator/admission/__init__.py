"""The admission server: `python -m gpushare_operator.admission`.

It answers AdmissionReview v1 at /mutate and /validate over HTTPS, by `gpushare.core.admission.review`. It is
stateless, so any number of replicas can run side by side. It watches the cluster only for more precise answers.
"""

from gpushare_operator.admission.review import review
from gpushare_operator.admission.server import AdmissionServerSettings, make_app, serve

__all__ = ["AdmissionServerSettings", "make_app", "review", "serve"]
