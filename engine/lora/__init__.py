"""Which adapter versions live in this worker's arena, and how their rows get there."""
