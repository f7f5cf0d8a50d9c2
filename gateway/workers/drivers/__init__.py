"""One driver per kind of worker: what differs between engines behind one protocol."""
