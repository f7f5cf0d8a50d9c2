"""The workers of this cluster: who is there, which one serves what, and how to talk to it."""
