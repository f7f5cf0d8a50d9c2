"""The one-command deployment: a private Valkey and local workers, kept alive and ended with us."""
