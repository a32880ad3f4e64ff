"""The model families, and the registry that builds one from a directory."""
