"""What a run shows while it trains: the published log lines, short ones, or a live line on a terminal."""
