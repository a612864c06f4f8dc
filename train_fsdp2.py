"""Launches call this file by its path; it is `python -m mindspeed_mm.entry.train_fsdp2`."""

from mindspeed_mm.entry.train_fsdp2 import main

if __name__ == "__main__":
    main()
