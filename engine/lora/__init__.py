"""Which adapters live on this worker: files, arena rows, leases."""
