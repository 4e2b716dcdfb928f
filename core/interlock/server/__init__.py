"""The OpenAI-compatible HTTP server. It imports no torch; the engine is a process of its own."""
