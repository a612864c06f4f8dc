"""Files of rows, whatever their format."""
