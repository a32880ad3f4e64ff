"""Refuses everything while this router's tokenizer is not the workers': its token ids would mean other text to them."""

import logging
from collections.abc import Callable

from kvstore.registry import ModelRecord
from kvstore.tokenizer_digest import tokenizer_mismatch
from pagewire.errors import FailedPrecondition

logger = logging.getLogger(__name__)


class TokenizerGuard:
    """Compares this router's digest with that of the index's record of the model. Asked for each request, so cheap.

    `record` gives the newest record, None while there is none (no index, or it was not read yet).
    """

    def __init__(self, own_digest: str, record: Callable[[], ModelRecord | None]) -> None:
        self._own_digest = own_digest
        self._record = record
        self._checked: ModelRecord | None = None
        self._error: FailedPrecondition | None = None

    def check(self) -> FailedPrecondition | None:
        """Why nothing may be served now; one log line for each change."""
        record = self._record()
        if record is not None and record != self._checked:
            self._checked = record
            self._look_at(record)
        return self._error

    def _look_at(self, record: ModelRecord) -> None:
        had_error, message = self._error is not None, tokenizer_mismatch(record, self._own_digest)
        if message is None:
            self._error = None
            if had_error:
                logger.info("the workers of model %r have this router's tokenizer again", record.name)
            return
        digests = {"router": self._own_digest, "workers": record.tokenizer_digest}
        if not had_error:
            logger.error("NOT_SERVING: %s", message, extra={f"{name}_digest": each for name, each in digests.items()})
        self._error = FailedPrecondition(message, reason="TOKENIZER_MISMATCH", metadata=digests)
