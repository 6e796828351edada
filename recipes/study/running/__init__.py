"""Trainings in processes of their own, in order, and what a study was begun as."""
