"""The worker's HTTP server: tokenizer, templates, detokenisation and SSE around the engine core.

Asynchronous, and free of torch. It meets the core in the messages of engine.protocol only.
"""
