"""The refit demo: trainers publish each version of their weights, and running vLLM servers take them over. See `__main__`."""
