"""Fakes for tests; nothing else of the package imports them."""
