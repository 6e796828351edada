"""What a study is asked to compare, and how large it is."""
