"""The systems that compare.py measures beside each other."""
