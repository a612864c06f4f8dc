"""Small things with no home of their own: errors, logging, nearest names."""
