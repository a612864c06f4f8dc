"""Launches call this file by its path; it is `python -m mindspeed_mm.entry.trainer`."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    here = Path(__file__).resolve()
    if Path(sys.path[0]).resolve() == here.parent:  # where Python looks first for the modules of a script
        sys.path[0] = str(here.parents[3])

    from mindspeed_mm.entry.trainer import main

    main()
