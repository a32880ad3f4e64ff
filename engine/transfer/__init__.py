"""Moves KV blocks between workers: frames, checksums and planes. No gRPC and no torch in here."""
