# The router: gRPC and OpenAI-compatible HTTP. No torch. From the root of the repository, with or without BuildKit:
#   docker build -f docker/router.Dockerfile -t quire/router .
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
    && python requirements.py router cli > requirements.txt \
    && pip --python /opt/quire/bin/python install --require-hashes --no-deps -r requirements.txt
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel . \
    && pip --python /opt/quire/bin/python install --no-deps --no-index /wheel/*.whl \
    && sh slim.sh /opt/quire

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="quire-router" \
      org.opencontainers.image.description="Router of Quire: admission, prefix-aware routing, gRPC and OpenAI-compatible HTTP" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# A new named volume takes its owner from the folder that it covers.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin quire \
    && install --directory --owner=quire --group=quire --mode=0700 /var/lib/quire/certs /var/lib/quire/decisions
# What is served unless another checkpoint is mounted here; the router reads tokenizer, chat template and fingerprint.
COPY cli/demo_model/checkpoint /model
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GRPC_VERBOSITY=NONE \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_ADMIN_HOST=0.0.0.0 \
    QUIRE_MODEL=/model
USER 10001:10001
# gRPC and HTTP for clients. The admin plane (50050, 51051) is left out: `docker run -P` publishes what is named here.
EXPOSE 50051 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-I", "-m", "common.rpc.probe", "127.0.0.1:50051"]
ENTRYPOINT ["quire-router"]
