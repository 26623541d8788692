# One image for every part of gpushare. The base needs Python >= 3.11 with venv; nothing else.
#   docker build -t localhost/gpushare:dev .
#   docker build --build-arg BASE_IMAGE=... .
# Where no package index can be reached from the build, put the wheels into build/wheels first (hack/cluster image does).
ARG BASE_IMAGE=python:3.12-slim

# What of pyproject.toml decides the dependencies, so that no other change in it installs them anew.
FROM ${BASE_IMAGE} AS requirements
COPY pyproject.toml hack/image/dependencies.py ./
RUN python3 dependencies.py pyproject.toml > /requirements.txt

# What changes rarely: the dependencies, in an environment of their own.
FROM ${BASE_IMAGE} AS dependencies
WORKDIR /build
COPY build/wheels* wheels/
COPY --from=requirements /requirements.txt ./
RUN if ls wheels/*.whl >/dev/null 2>&1; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=/build/wheels; fi; \
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1; \
    python3 -m venv /opt/gpushare \
    && /opt/gpushare/bin/pip install -q -r requirements.txt \
    && python3 -m venv /opt/build \
    && /opt/build/bin/pip install -q "hatchling>=1.24" \
    && rm -rf /opt/gpushare/lib/python3*/site-packages/pip* /opt/gpushare/lib/python3*/site-packages/setuptools* \
    && find /opt/gpushare -name tests -type d -prune -exec rm -rf {} + \
    && find /opt/gpushare -path '*/kubernetes/*/models/__pycache__' -prune -exec rm -rf {} + \
    && mkdir /opt/gpushare/app \
    && echo /opt/gpushare/app > "$(echo /opt/gpushare/lib/python3*/site-packages)/app.pth"

# What changes often: our own wheel, unpacked where the environment looks for it.
FROM dependencies AS application
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY operator operator
COPY deviceplugin deviceplugin
RUN mkdir -p /app/bin \
    && /opt/build/bin/python -c "from hatchling.build import build_wheel; print(build_wheel('/app'))" \
    && cd /app && python3 -m zipfile -e *.whl . && rm *.whl \
    && printf '#!/opt/gpushare/bin/python\nimport sys\nfrom gpushare.cli import main\nsys.exit(main())\n' > bin/gpushare \
    && chmod 755 bin/gpushare && ln -s gpushare bin/kubectl-gpushare \
    && /opt/gpushare/bin/python -m compileall -q /app

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title=gpushare \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.description="Share GPUs in space under CUDA MPS on Kubernetes"
ENV PATH=/opt/gpushare/app/bin:/opt/gpushare/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    USER=gpushare \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OPENBLAS_NUM_THREADS=1
COPY --from=dependencies /opt/gpushare /opt/gpushare
COPY --from=application /app /opt/gpushare/app
# The parts that need more (the node agent and the MPS host) say so in the chart.
USER 65532:65532
ENTRYPOINT []
CMD ["gpushare", "--help"]
