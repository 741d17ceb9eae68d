# The orchestrator: control of a run, no torch.
# Build at the root of the checkout: docker build -f deploy/docker/orchestrator.Dockerfile -t millrace-orchestrator .
# BASE_IMAGE: any with Python 3.11 or newer and useradd. PIP_INDEX_URL, PIP_EXTRA_INDEX_URL: where packages come from.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm

FROM ${BASE_IMAGE} AS packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS=orchestrator
WORKDIR /build
RUN python3 -m venv /opt/millrace
ENV PATH=/opt/millrace/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md LICENSE deploy/docker/constraints.txt ./
# The packages alone: the code comes later, so that a change to it installs nothing again.
RUN mkdir services && touch services/__init__.py \
    && pip install --constraint constraints.txt ".[${EXTRAS}]" \
    && pip uninstall --yes millrace

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --create-home millrace && install --directory --owner=millrace --group=millrace /runs
COPY --from=packages /opt/millrace /opt/millrace
WORKDIR /app
COPY services services
COPY recipes recipes
ENV PATH=/opt/millrace/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-m", "services.common.rpc.health", "127.0.0.1:50050"]
ENTRYPOINT ["python", "-m", "services.cli"]
