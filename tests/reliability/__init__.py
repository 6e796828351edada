"""Long tests of what must outlive a week: run by name, python -m tests.reliability.NAME."""
