# The router: no torch, about 300 MB. From the repository's root:
#   docker build -f deploy/docker/router.Dockerfile -t pagewire-router:0.1.0 .
# A release pins the base by digest: --build-arg PYTHON_IMAGE=python:3.11.13-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/pagewire
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY third_party third_party
COPY pagewire pagewire
COPY kvstore kvstore
COPY router router
# setuptools wants every listed package; the router imports none of these.
COPY engine engine
COPY kernels kernels
COPY offline offline
COPY transfer_svc transfer_svc
COPY prefill_svc prefill_svc
COPY decode_svc decode_svc
RUN /opt/pagewire/bin/pip install -c constraints.txt '.[router,auth,otel]' \
 && /opt/pagewire/bin/python -c 'import router.main, importlib.util as u; assert u.find_spec("torch") is None'

FROM ${PYTHON_IMAGE} AS router
LABEL org.opencontainers.image.title="pagewire-router" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/pagewire /opt/pagewire
# Nothing is written but /tmp: run it with a read-only root.
ENV PATH=/opt/pagewire/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    PAGEWIRE_HOST=0.0.0.0 PAGEWIRE_LOG_FORMAT=json PAGEWIRE_METRICS_PORT=9090
USER 10001:10001
EXPOSE 50051 8000 9090
# The process, not its services: without workers a router is healthy and NOT_SERVING.
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 CMD ["pagewire", "health", "--target", "127.0.0.1:50051"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["pagewire"]
CMD ["router", "--model", "/models/model", "--http-port", "8000"]
