"""Bugs that were made, or nearly, as patches; each names the tests that must find it."""
