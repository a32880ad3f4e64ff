"""KvTransferService, which every worker serves and calls: who may read which KV until when, and getting it here."""
