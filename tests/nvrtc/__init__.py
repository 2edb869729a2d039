"""A CUDA device for update.c on the host: its threads in a loop, NVRTC and the driver around it."""
