"""The report of a run: a page and a picture, made of what the run folder holds; nothing here imports torch."""
