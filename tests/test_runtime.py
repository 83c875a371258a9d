"""Device, stopwatch and memory of the process."""

import subprocess
import sys

import numpy as np
import pytest

from otfuse_cli.runtime import peak_rss_bytes

SAY_PEAK = "from otfuse_cli.runtime import peak_rss_bytes; print(peak_rss_bytes())"


def child_peak() -> int:
    return int(
        subprocess.run([sys.executable, "-c", SAY_PEAK], capture_output=True, check=True).stdout
    )


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the peak is all that the system says"
)
def test_peak_memory_is_not_inherited():
    """A child of a large process says its own peak (`ru_maxrss` would be the parent's)."""
    ballast = np.ones(2**25)
    assert peak_rss_bytes() > ballast.nbytes
    assert 2**20 < child_peak() < ballast.nbytes
