"""What is drawn in a terminal: lines, bars, curves, tables."""
