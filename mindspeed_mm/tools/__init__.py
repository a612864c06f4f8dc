"""Command lines: convert, doctor, data check, extract-features."""
