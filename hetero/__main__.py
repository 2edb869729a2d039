"""``python -m hetero``, for launchers of modules (accelerate launch, torchrun)."""

from hetero.cli import main

if __name__ == "__main__":
    main(prog_name="hetero")
