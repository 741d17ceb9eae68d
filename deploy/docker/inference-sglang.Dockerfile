# An inference service with SGLang engines, for NVIDIA GPUs. SGLang's own pins, which differ from the other images'.
# Build at the root of the checkout: docker build -f deploy/docker/inference-sglang.Dockerfile -t rollmill-inference-sglang .
# BASE_IMAGE: any with apt, CUDA 13 and its compiler, with which FlashInfer builds kernels at their first use, and Python 3.12.
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL: where packages come from; torch must be the index's CUDA build.
ARG BASE_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

FROM ${BASE_IMAGE} AS python
# The distribution's own Python: which patch release is not ours to pin. The compiler builds Triton's launchers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM python AS packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS=inference,sglang
WORKDIR /build
RUN python3 -m venv /opt/rollmill
ENV PATH=/opt/rollmill/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md LICENSE deploy/docker/inference-sglang.constraints.txt ./
# The packages alone: the code comes later, so that a change to it installs nothing again.
RUN mkdir services extras rollmill && touch services/__init__.py extras/__init__.py rollmill/__init__.py \
    && pip install --constraint inference-sglang.constraints.txt ".[${EXTRAS}]" \
    && pip uninstall --yes rollmill

FROM python
# Named volumes are mounted over these, and take their owner.
RUN useradd --uid 10001 --create-home rollmill \
    && install --directory --owner=rollmill --group=rollmill /runs /runs/worlds /models
COPY --from=packages /opt/rollmill /opt/rollmill
WORKDIR /app
COPY services services
COPY extras extras
COPY rollmill rollmill
COPY recipes recipes
ENV PATH=/opt/rollmill/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HOME=/models
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-P", "-m", "services.cli"]
