"""Dialects of YAML in which a run may be written; each module defines one, as `DIALECT` (`configs/yaml_run.py`)."""
