# featx with the packaged model, for CPUs and, as torch of PyPI brings its own CUDA, for GPUs.
#
#   docker build -t featx .
#   docker run --rm -v "$PWD/photos:/photos:ro" -v "$PWD/runs:/runs" featx data=folder data.root=/photos
#   docker run --rm --gpus all ...
#
# Another base, such as one with the CUDA tools:
#   docker build -t featx:cuda --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Extras of featx to install; see docs/install.md.
ARG EXTRAS=demo,heif,table,remote,export,report

ENV PIP_NO_CACHE_DIR=1 \
    PATH=/opt/featx/bin:$PATH

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# libgomp1 is for torch, ffmpeg for data=video. An image of CUDA has no Python.
# hadolint ignore=DL3008
RUN apt-get update \
    && packages=(libgomp1 ffmpeg) \
    && if ! command -v python3 > /dev/null; then packages+=(python3 python3-venv); fi \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}" \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/featx

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY scripts/build_hook.py scripts/build_hook.py
COPY featx featx
COPY conf conf
COPY data data
# hadolint ignore=DL3013
RUN pip install ".[${EXTRAS}]" && python -m featx job=doctor

# A user without rights: featx decodes files of strangers.
RUN useradd --create-home --uid 1000 featx && mkdir /runs && chown featx /runs
USER 1000
WORKDIR /runs

ENTRYPOINT ["python", "-m", "featx"]
