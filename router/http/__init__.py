"""OpenAI's HTTP API on the router's pipeline; it knows nothing that the gRPC service does not know too."""
