"""The files of a batch: requests, read line by line, and answers, appended line by line and read once at a start."""

import codecs
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import xxhash
from pydantic_core import from_json, to_json

from pagewire.errors import InvalidArgument
from router.http.body import MAX_BODY_BYTES
from router.http.responses import Json

MAX_LINE_BYTES = MAX_BODY_BYTES
MAX_CUSTOM_ID_CHARS = 512
_CHUNK_BYTES = 1 << 20


class NotABatchOutput(ValueError):
    """The output file holds something else, or belongs to a run that goes on."""


class BadLine(Exception):
    """A line that is no request; `code` is for programs."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, object]


@dataclass(slots=True)
class Answered:
    """What the output file has already: digests of custom ids (16 bytes each), and numbers of lines that were bad."""

    custom_ids: set[bytes] = field(default_factory=set)
    bad_lines: set[int] = field(default_factory=set)


def digest(custom_id: str) -> bytes:
    """Stands for a custom id in memory."""
    return xxhash.xxh3_128_digest(custom_id.encode(errors="surrogatepass"))


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """(number from 1, line) of all lines that are not blank; None for one that is too long, which is skipped."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) <= MAX_LINE_BYTES or line.endswith(b"\n"):
            if line.strip():
                yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_CHUNK_BYTES)
        yield number, None


def count_lines(path: Path) -> int | None:
    """Lines that are not empty; None for what can only be read once (a pipe)."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(1 for _ in numbered_lines(file))


def parse_line(line: bytes | None) -> BatchRequest:
    """Raises BadLine."""
    if line is None:
        raise BadLine("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        value = from_json(line.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise BadLine("invalid_json_line", f"the line must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadLine("invalid_json_line", "the line must be a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise BadLine("invalid_custom_id", f"custom_id must be a text of 1 … {MAX_CUSTOM_ID_CHARS} characters")
    if (method := value.get("method", "POST")) != "POST":
        raise BadLine("invalid_method", f"method = {str(method)[:40]!r}: must be 'POST'", custom_id)
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str):
        raise BadLine("invalid_url", "url must be a text", custom_id)
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body must be a JSON object", custom_id)
    return BatchRequest(custom_id, url, body)


class BatchOutput:
    """The output file, open for appending by this process alone. A line is there whole, or torn and cut off next time.

    Use it in a `with`.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, NotABatchOutput."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NotABatchOutput(f"{path}: another run writes to it") from None
            self.answered = self._recover(path)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, record: Json) -> None:
        """Writes one line; it survives the end of this process, however that comes."""
        data = memoryview(to_json(record) + b"\n")
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        """Everything is on disk then."""
        try:
            os.fsync(self._file)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EROFS):  # a pipe or a terminal has no disk
                raise
        finally:
            os.close(self._file)

    def _recover(self, path: Path) -> Answered:
        answered, end, line = Answered(), 0, b""
        if not path.is_file():
            return answered
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not _note(line, answered):
                    if line.endswith(b"\n"):
                        raise NotABatchOutput(f"{path}: line {number} is no answer of a batch; nothing was changed")
                    os.ftruncate(self._file, end)  # torn: the process was killed while it wrote
                    return answered
                end += len(line)
        if line and not line.endswith(b"\n"):
            os.write(self._file, b"\n")
        return answered

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _note(line: bytes, answered: Answered) -> bool:
    """Takes an output line into account; False if it is none."""
    try:
        record = from_json(line)
    except ValueError:
        return False
    if not isinstance(record, dict) or "custom_id" not in record or "response" not in record:
        return False
    error = record.get("error")
    if isinstance(error, dict) and isinstance(error.get("line"), int):
        answered.bad_lines.add(error["line"])
    elif isinstance(record["custom_id"], str):
        answered.custom_ids.add(digest(record["custom_id"]))
    return True


def refuse_same_file(source: Path, out: Path) -> None:
    """Raises InvalidArgument."""
    if source.exists() and out.exists() and source.samefile(out):
        raise InvalidArgument("OUT", str(out), "must not be the input")
