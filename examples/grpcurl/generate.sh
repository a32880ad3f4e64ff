#!/bin/sh
# One line of grpcurl, by reflection: no protos needed. Usage: generate.sh [HOST:PORT]
grpcurl -plaintext -d '{"text": "The capital of France is", "sampling": {"max_tokens": 16, "temperature": 0}}' \
  "${1:-127.0.0.1:50051}" pagewire.v1.InferenceService/Generate
