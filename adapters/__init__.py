"""What an adapter is: format, validation, content-addressed store and registry."""
