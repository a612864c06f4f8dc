"""Media of rows: what their headers say, and what they are decoded to."""
