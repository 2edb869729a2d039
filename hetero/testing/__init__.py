"""Fakes for tests; no other module of the package imports them."""
