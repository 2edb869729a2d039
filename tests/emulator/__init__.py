"""An emulated CUDA device, and the tests that need one. `fake` is what tests use."""
