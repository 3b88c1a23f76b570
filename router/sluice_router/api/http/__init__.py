"""The OpenAI-compatible API over HTTP: connections, requests, answers, streams."""
