"""`pagewire convert`: a GGUF file to safetensors, tokenizer and config."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire.cli.failure import CommandFailed
from pagewire.cli.progress import stage_progress


def convert(
    source: Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="File to convert.")],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="New directory for the model.")],
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="bfloat16|float32", help="Type that quantized weights are expanded to.")
    ] = "bfloat16",
) -> int:
    """Convert a GGUF model to a directory that pagewire serves."""
    if not source.is_file():
        raise CommandFailed(f"{source}: no such file")
    try:
        gguf: Any = importlib.import_module("engine.gguf")
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error}: install 'pagewire[demo]'") from None
    with stage_progress(source.name) as progress:
        try:
            gguf.convert_gguf(source, out, dtype=dtype, progress=progress)
        except gguf.ConvertError as error:
            raise CommandFailed(" ".join(str(error).split())) from None
    print(out)
    return 0
