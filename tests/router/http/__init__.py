"""OpenAI's HTTP API over scripted workers."""
