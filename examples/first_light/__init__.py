"""The demo: a replica without weight files starts out of another replica's memory. See `__main__`."""
