# A prefill or decode worker. From the repository's root:
#   docker build -f deploy/docker/worker.Dockerfile --build-arg TORCH_INDEX_URL=… -t pagewire-worker:0.1.0-cpu .
#   docker build -f deploy/docker/worker.Dockerfile --build-arg EXTRAS=worker,gpu,auth,otel -t pagewire-worker:0.1.0-cuda .
# TORCH_INDEX_URL: an index whose torch is the CPU build. Without it pip takes the CUDA build, which brings CUDA's own
# libraries along: the host only needs NVIDIA's driver and container toolkit.
# A release pins the base by digest: --build-arg PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# Debian's security updates win over a pinned compiler, which is not in the final image.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/pagewire
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY third_party third_party
ARG TORCH_INDEX_URL=
# torch first: the largest layer, and the one that changes least.
RUN /opt/pagewire/bin/pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -c constraints.txt torch
COPY pagewire pagewire
COPY kvstore kvstore
COPY router router
COPY engine engine
COPY kernels kernels
COPY offline offline
COPY transfer_svc transfer_svc
COPY prefill_svc prefill_svc
COPY decode_svc decode_svc
ARG EXTRAS=worker,auth,otel
RUN /opt/pagewire/bin/pip install -c constraints.txt ".[${EXTRAS}]" ./kernels/cpu

FROM ${PYTHON_IMAGE} AS worker
LABEL org.opencontainers.image.title="pagewire-worker" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/pagewire /opt/pagewire
# Written are /tmp (also Triton's kernels) and /cache (packed weights): run it with a read-only root and both mounted.
ENV PATH=/opt/pagewire/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    TRITON_CACHE_DIR=/tmp/triton HF_HUB_OFFLINE=1 PAGEWIRE_CACHE=/cache \
    PAGEWIRE_HOST=0.0.0.0 PAGEWIRE_PORT=50052 PAGEWIRE_LOG_FORMAT=json PAGEWIRE_METRICS_PORT=9090
USER 10001:10001
EXPOSE 50052 9090
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=3 CMD ["pagewire", "health", "--target", "127.0.0.1:50052"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["pagewire"]
CMD ["decode", "--model", "/models/model"]
