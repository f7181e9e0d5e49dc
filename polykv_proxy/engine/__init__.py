"""Everything that knows it is talking to llama-server."""
