"""Benchmarks of the engine and of its peers: `tlt bench`, and the per-op suite in test_kernels.py."""
