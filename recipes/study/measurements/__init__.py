"""What is computed of finished trainings besides their scores."""
