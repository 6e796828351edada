"""What finished trainings left, and what it shows."""
