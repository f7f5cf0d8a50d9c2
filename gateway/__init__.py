"""The gateway: one OpenAI-compatible address in front of many engine workers."""
