"""Fakes and forks for tests and benchmarks; no other module of the package imports them."""
