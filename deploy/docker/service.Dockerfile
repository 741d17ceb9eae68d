# One of the four services: orchestrator, envgateway, inference (torch engine) or trainer. EXTRAS says which packages it has.
# Build at the root of the checkout, such as the gateway with ALFWorld's engine:
#   docker build -f deploy/docker/service.Dockerfile --build-arg EXTRAS=envgateway,alfworld -t rollmill-envgateway-alfworld .
# BASE_IMAGE: any Debian with Python 3.11 or newer. PIP_INDEX_URL, PIP_EXTRA_INDEX_URL: where packages come from.
# SPACY_MODEL: the model of WebShop's tagger, where the recipe wants spaCy.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm

FROM ${BASE_IMAGE} AS packages
ARG EXTRAS
# ALFWorld's planner is compiled; the compiler stays in this stage. Which patch release it has is not ours to pin.
# hadolint ignore=DL3008
RUN case ",${EXTRAS}," in *,alfworld,*) \
        apt-get update && apt-get install --yes --no-install-recommends cmake g++ make && rm -rf /var/lib/apt/lists/* ;; \
    esac
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG SPACY_MODEL
WORKDIR /build
RUN python3 -m venv /opt/rollmill
ENV PATH=/opt/rollmill/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY pyproject.toml README.md LICENSE constraints.txt ./
# The packages alone: the code comes later, so that a change to it installs nothing again.
RUN mkdir services extras rollmill && touch services/__init__.py extras/__init__.py rollmill/__init__.py \
    && pip install --constraint constraints.txt ".[${EXTRAS:?name the extras, such as EXTRAS=trainer}]" \
    && pip uninstall --yes rollmill \
    && if [ -n "${SPACY_MODEL}" ]; then python -m spacy download "${SPACY_MODEL}"; fi

FROM ${BASE_IMAGE}
ARG EXTRAS
# The engine compiles its decoding step for the CPU of the machine that runs it.
# hadolint ignore=DL3008
RUN case ",${EXTRAS}," in *,inference,*) \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* ;; \
    esac
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
