"""What is computed in the next step, and who waits. Plain Python over integers."""
