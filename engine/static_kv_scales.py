"""Static scales that checkpoints bring for an FP8 KV cache, by their makers' names: left alone, with a warning."""

import logging
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_NAMES = (
    "k_scale", "v_scale", "kv_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "v_proj.output_scale",
)  # fmt: skip
_ENDS = tuple(f".self_attn.{name}" for name in _NAMES)


def without_static_scales(directory: Path, names: Sequence[str]) -> list[str]:
    """The tensors but such scales, of which the log says that --kv-cache-dtype doesn't use them."""
    scales = [name for name in names if name.endswith(_ENDS)]
    if scales:
        logger.warning(
            "%s: %d static scales of the KV cache are not used, from %s on: --kv-cache-dtype gives each token's key "
            "and value of a head a scale of its own",
            *(directory, len(scales), scales[0]),
        )
    return [name for name in names if not name.endswith(_ENDS)]
