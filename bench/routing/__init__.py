"""The parts of `bench/prefix_routing.py`."""
