"""A sweep's results for people: one HTML page, and a CSV file."""
