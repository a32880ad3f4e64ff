"""Clients that nobody here wrote, against real processes."""
