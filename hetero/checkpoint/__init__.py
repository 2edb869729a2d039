"""Checkpoints: crash-safe, checksummed, without pickle (floor 4).

`manifest`, `shard`, `folders`, `writer`, `reader` and `verify` are the byte level: they know
entries, not models, and import no torch.
"""
