"""Running a network: on what inputs, in what dtype, and what it shows."""
