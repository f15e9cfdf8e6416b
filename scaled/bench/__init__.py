"""Benchmarks: alternatives measured in turn in one run, with the counts that explain them."""
