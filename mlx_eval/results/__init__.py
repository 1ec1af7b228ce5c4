"""Results: rows, tables and files. Knows numbers, no model."""
