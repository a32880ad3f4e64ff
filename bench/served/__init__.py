"""Whole systems beside each other, asked through their own doors: `python -m bench.served`."""
