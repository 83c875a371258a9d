"""Pictures of numbers that others computed: charts as data, drawn by matplotlib or as a web page.

Neither checkpoints nor numerics may enter; matplotlib is imported where it draws, and nowhere else.
"""
