"""Who may do what: keys for now, limits and usage later."""
