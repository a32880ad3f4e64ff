# Envoy with deploy/envoy/envoy.yaml and the descriptors of the stubs in the router's image.
ARG ROUTER_IMAGE=pagewire-router:0.1.0
ARG ENVOY_IMAGE=envoyproxy/envoy:distroless-v1.37.0

FROM ${ROUTER_IMAGE} AS descriptors
COPY deploy/envoy/descriptors.py /tmp/descriptors.py
RUN ["python", "/tmp/descriptors.py", "/tmp/pagewire.binpb"]

FROM ${ENVOY_IMAGE}
COPY --from=descriptors /tmp/pagewire.binpb /etc/envoy/pagewire.binpb
COPY deploy/envoy/envoy.yaml /etc/envoy/envoy.yaml
USER 10001:10001
EXPOSE 8080
CMD ["-c", "/etc/envoy/envoy.yaml"]
