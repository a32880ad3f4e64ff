"""What workers register about themselves and their model, as plain data."""

import json
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker's entry in the registry.

    `incarnation` is random per process start (u64): what an older one said is void. `generation` grows each time
    the worker publishes all its blocks anew, `seq` with each change inside a generation; both are the publisher's.
    `capacity` is the number of blocks in the pool. The other fields are the worker's fingerprint.
    """

    worker_id: str
    endpoint: str
    role: Role
    incarnation: int
    generation: int = 0
    seq: int = 0
    capacity: int = 0
    root: bytes = b""
    layout_id: str = ""
    numerics_class: str = ""
    block_size: int = 0
    block_bytes: tuple[int, ...] = ()

    @property
    def position(self) -> tuple[int, int, int]:
        """Where the worker's history stands; equal positions mean equal holdings."""
        return self.incarnation, self.generation, self.seq

    def fingerprint_json(self) -> str:
        """The fingerprint as it lies in Redis."""
        return json.dumps(
            {
                "root": self.root.hex(),
                "layout_id": self.layout_id,
                "numerics_class": self.numerics_class,
                "block_size": self.block_size,
                "block_bytes": self.block_bytes,
            },
            separators=(",", ":"),
        )

    def to_hash(self) -> dict[str, str]:
        """The record as a Redis hash; the worker id is in the hash's name."""
        return {
            "endpoint": self.endpoint,
            "role": self.role,
            "incarnation": str(self.incarnation),
            "generation": str(self.generation),
            "seq": str(self.seq),
            "capacity": str(self.capacity),
            "fingerprint": self.fingerprint_json(),
        }

    @classmethod
    def from_hash(cls, worker_id: str, fields: dict[bytes, bytes]) -> "WorkerRecord":
        """Reads `to_hash`; ValueError names the worker if the hash is not a record."""
        try:
            fingerprint = json.loads(fields[b"fingerprint"])
            role = fields[b"role"].decode()
            if role not in ("prefill", "decode"):
                raise ValueError(f"role {role!r}")
            return cls(
                worker_id=worker_id,
                endpoint=fields[b"endpoint"].decode(),
                role="prefill" if role == "prefill" else "decode",
                incarnation=int(fields[b"incarnation"]),
                generation=int(fields[b"generation"]),
                seq=int(fields[b"seq"]),
                capacity=int(fields[b"capacity"]),
                root=bytes.fromhex(fingerprint["root"]),
                layout_id=str(fingerprint["layout_id"]),
                numerics_class=str(fingerprint["numerics_class"]),
                block_size=int(fingerprint["block_size"]),
                block_bytes=tuple(int(n) for n in fingerprint["block_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"worker {worker_id!r} has a registry entry that cannot be read: {error!r}") from error


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One served model's entry in `pw:models`: what a router must know before it meets a worker."""

    name: str
    root: bytes
    tokenizer_digest: str = ""
    max_model_len: int = 0
    block_size: int = 0
    vocab_size: int = 0

    def to_json(self) -> str:
        """The record as it lies in Redis; the name is the hash field."""
        values: dict[str, Any] = {
            "root": self.root.hex(),
            "tokenizer_digest": self.tokenizer_digest,
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "vocab_size": self.vocab_size,
        }
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, name: str, text: bytes | str) -> "ModelRecord":
        """Reads `to_json`; ValueError names the model if the text is not a record."""
        try:
            values = json.loads(text)
            return cls(
                name=name,
                root=bytes.fromhex(values["root"]),
                tokenizer_digest=str(values["tokenizer_digest"]),
                max_model_len=int(values["max_model_len"]),
                block_size=int(values["block_size"]),
                vocab_size=int(values["vocab_size"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"model {name!r} has an entry in pw:models that cannot be read: {error!r}") from error
