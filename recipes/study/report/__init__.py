"""What a study shows, as text, tables and pictures."""
