"""Work on other processes and machines: what is sent there, and the cluster that runs it."""
