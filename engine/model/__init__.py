"""The base model: what it is, how it is read, and one step of it."""
