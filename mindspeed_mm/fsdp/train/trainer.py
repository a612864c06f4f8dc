"""Launches call this file by its path; it is `python -m mindspeed_mm.entry.trainer`."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[3])  # Python put this file's own folder there

    from mindspeed_mm.entry.trainer import main

    main()
