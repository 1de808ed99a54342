# The GPU worker, for CPUs (target cpu) and NVIDIA GPUs (target cuda). From the root of the repository, with or without
# BuildKit:
#   docker build -f docker/gpuworker.Dockerfile --target cpu -t quire/gpuworker:cpu .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS tools
# Debian keeps one version of g++ in a release, and takes those that it mended away: there is none to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
RUN python -m venv --without-pip /opt/quire
COPY pyproject.toml requirements.lock constraints.txt docker/requirements.py docker/slim.sh ./

# The native CPU kernels for each level of vector instructions, compiled once for both targets.
FROM tools AS wheel
# Where pip finds packages is the builder's business: each of these is one of pip's own variables while it is given.
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
RUN python requirements.py --build > build.txt \
    && pip install --require-hashes --no-deps -r build.txt
COPY . .
RUN QUIRE_CPU_LEVELS=all pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

FROM ${PYTHON_IMAGE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="quire-gpuworker" \
      org.opencontainers.image.description="GPU worker of Quire: runs steps of a language model on leased KV blocks" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin quire
# What is served unless another checkpoint is mounted here.
COPY cli/demo_model/checkpoint /model
ENV PATH=/opt/quire/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GRPC_VERBOSITY=NONE \
    HF_HOME=/tmp/huggingface \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_MODEL=/model
# gRPC, and /metrics.
EXPOSE 50053 51053
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-I", "-m", "common.rpc.probe", "http://127.0.0.1:51053/health"]
ENTRYPOINT ["quire-gpuworker"]

FROM tools AS packages-cpu
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
# PyTorch's own index has builds without CUDA; pip takes them because 2.13.0+cpu counts as newer than 2.13.0.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN python requirements.py gpuworker > requirements.txt \
    && pip --python /opt/quire/bin/python install --require-hashes --no-deps -r requirements.txt \
    && pip --python /opt/quire/bin/python install -c constraints.txt torch
COPY --from=wheel /wheel /wheel
RUN pip --python /opt/quire/bin/python install --no-deps --no-index /wheel/*.whl \
    && sh slim.sh /opt/quire

FROM runtime AS cpu
COPY --from=packages-cpu /opt/quire /opt/quire
ENV QUIRE_DEVICE=cpu
USER 10001:10001

FROM tools AS packages-cuda
ARG PIP_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG PIP_EXTRA_INDEX_URL
# PyPI's torch brings the CUDA runtime in packages of its own; the host needs the driver and its container toolkit alone.
RUN python requirements.py gpuworker gpu > requirements.txt \
    && pip --python /opt/quire/bin/python install --require-hashes --no-deps -r requirements.txt \
    && pip --python /opt/quire/bin/python install -c constraints.txt torch triton
COPY --from=wheel /wheel /wheel
RUN pip --python /opt/quire/bin/python install --no-deps --no-index /wheel/*.whl \
    && sh slim.sh /opt/quire

FROM runtime AS cuda
# Triton compiles the launcher of each kernel in C, when it first runs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=packages-cuda /opt/quire /opt/quire
ENV QUIRE_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TRITON_CACHE_DIR=/tmp/triton
USER 10001:10001
