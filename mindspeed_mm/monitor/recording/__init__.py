"""What a run leaves for its report, in `<save>/report/`: samples, lengths, ranks, experts (docs/report.md)."""
