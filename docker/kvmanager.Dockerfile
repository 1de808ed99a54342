# The KV manager: the ledger of every worker's blocks. No torch. From the root of the repository, with or without BuildKit:
#   docker build -f docker/kvmanager.Dockerfile -t quire/kvmanager .
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# Where pip finds packages is the builder's business: each of these is one of pip's own variables while it is given.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
RUN python -m venv --without-pip /opt/quire
# First the dependencies: this layer is made again only when they change.
COPY pyproject.toml requirements.lock docker/requirements.py docker/slim.sh ./
RUN python requirements.py --build > build.txt \
    && pip install --require-hashes --no-deps -r build.txt \
    && python requirements.py kvmanager > requirements.txt \
    && pip --python /opt/quire/bin/python install --require-hashes --no-deps -r requirements.txt
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel . \
    && pip --python /opt/quire/bin/python install --no-deps --no-index /wheel/*.whl \
    && sh slim.sh /opt/quire

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="quire-kvmanager" \
      org.opencontainers.image.description="KV manager of Quire: block tables, eviction and preemption of every worker" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# A new named volume takes its owner from the folder that it covers.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin quire \
    && install --directory --owner=quire --group=quire /var/lib/quire
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GRPC_VERBOSITY=NONE \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_STATE_DIR=/var/lib/quire
WORKDIR /var/lib/quire
USER 10001:10001
# gRPC, and /metrics.
EXPOSE 50052 51052
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-I", "-m", "common.rpc.probe", "http://127.0.0.1:51052/health"]
ENTRYPOINT ["quire-kvmanager"]
