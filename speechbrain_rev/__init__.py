"""Train very deep speaker encoders in little memory with SpeechBrain."""

__version__ = "0.1.0"
