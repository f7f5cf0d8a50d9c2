"""The worker: an asynchronous HTTP server around a synchronous engine core."""
