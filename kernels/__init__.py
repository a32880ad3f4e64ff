"""pagewire's kernels: each op's oracle (`reference`), the torch kernel set (`tiled`), and later native ones.

Hugging Face publishes a package of the same name, which transformers imports when it finds version 0.9 or later.
So this file stays light (transformers imports it to read the version) and the version below 0.9: transformers then
takes the package for one that is too old and leaves it alone. `DISTRIBUTION` lets a process tell the two apart:
importing `engine.kernels_package` checks it, which every worker does before it uses anything of `kernels`.
"""

__version__ = "0.1.0"

DISTRIBUTION = "pagewire"
