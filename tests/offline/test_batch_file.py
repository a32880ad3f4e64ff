"""The files of a batch: what is a request, what is an answer, and what a killed run leaves."""

import io
import json
from pathlib import Path

import pytest

from offline import batch_file
from offline.batch_file import BadLine, BatchOutput, NotABatchOutput, digest, numbered_lines, parse_line

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def answer(custom_id: str | None, line: int | None = None) -> dict[str, object]:
    error = None if line is None else {"code": "c", "message": "m", "line": line}
    return {"id": "b", "custom_id": custom_id, "response": None if error else {"status_code": 200}, "error": error}


def test_lines_are_numbered_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(batch_file, "_CHUNK_BYTES", 7)
    file = io.BytesIO(b"one\n\n  \r\n" + b"x" * 10 + b"\n" + b"y" * 11 + b"\n" + b"z" * 100 + b"\nlast")
    expected = [(1, b"one\n"), (4, b"x" * 10 + b"\n"), (5, None), (6, None), (7, b"last")]
    assert list(numbered_lines(file)) == expected
    assert list(numbered_lines(io.BytesIO(b"z" * 100))) == [(1, None)]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"custom_id": 3}, "invalid_custom_id", "1 … 512 characters"),
        ({"custom_id": ""}, "invalid_custom_id", "1 … 512 characters"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "1 … 512 characters"),
        ({"method": "GET"}, "invalid_method", "'GET': must be 'POST'"),
        ({"url": None}, "invalid_url", "must be a text"),
        ({"body": []}, "invalid_body", "must be a JSON object"),
    ],
)
def test_bad_lines_are_named(change: dict[str, object], code: str, said: str) -> None:
    with pytest.raises(BadLine, match=said) as caught:
        parse_line(json.dumps(GOOD | change).encode())
    assert caught.value.code == code
    assert caught.value.custom_id == ("a" if "custom_id" not in change else None)


def test_lines_that_are_no_objects() -> None:
    for line in (b"{", b"[]", b"3", b'{"custom_id": NaN}', b'{"a": "\\ud800"}', b"\xff"):
        with pytest.raises(BadLine) as caught:
            parse_line(line)
        assert caught.value.code == "invalid_json_line"
    with pytest.raises(BadLine, match="more than"):
        parse_line(None)
    request = parse_line(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert (request.custom_id, request.url, request.body) == ("a", "/v1/completions", {"prompt": "x"})


def test_what_was_answered_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchOutput(path) as output:
        assert not output.answered.custom_ids
        output.append(answer("a"))
        output.append(answer("a", line=7))
        output.append(answer(None, line=8))
        with pytest.raises(NotABatchOutput, match="another run writes to it"):
            BatchOutput(path)
    with BatchOutput(path) as output:
        assert output.answered.custom_ids == {digest("a")}
        assert output.answered.bad_lines == {7, 8}
        output.append(answer("b"))
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "a", None, "b"]


def test_every_way_to_tear_the_last_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = (json.dumps(answer(name)).encode() + b"\n" for name in "ab")
    for kept in range(len(second) + 1):
        path.write_bytes(first + second[:kept])
        with BatchOutput(path) as output:
            is_whole = kept >= len(second) - 1
            assert output.answered.custom_ids == ({digest("a"), digest("b")} if is_whole else {digest("a")}), kept
            output.append(answer("c"))
        names = [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]
        assert names == (["a", "b", "c"] if is_whole else ["a", "c"])


@pytest.mark.parametrize(
    "content", ["my notes\n", '{"a": 1}\n', '{"custom_id": "x"}\n' + json.dumps(answer("b")) + "\n"]
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(NotABatchOutput, match="line 1 is no answer of a batch"):
        BatchOutput(path)
    assert path.read_text() == content
