"""Command lines: convert, plan, report, doctor, data check."""
