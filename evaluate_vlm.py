"""Launches call this file by its path; it is `python -m mindspeed_mm.entry.evaluate_vlm`."""

from mindspeed_mm.entry.evaluate_vlm import main

if __name__ == "__main__":
    main()
