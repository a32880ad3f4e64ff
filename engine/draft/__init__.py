"""A small model that guesses what the served one says next; see `engine.speculation` for what becomes of guesses."""
