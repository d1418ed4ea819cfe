"""Speed, as ratios measured in one run. `python -m benchmarks` runs all and writes RESULTS.md."""
