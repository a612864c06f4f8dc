"""Places of files that published launches name by their path."""
