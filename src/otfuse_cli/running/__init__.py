"""Running a network: forward passes, samples, evaluation."""
