"""What a file of measurements and scripts/benchmark agree on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

Run = Callable[[argparse.Namespace], None]

Add = Callable[[str, Run], argparse.ArgumentParser]
"""Makes a command of a function; its docstring is the help, its options are added to the parser."""

COMMAND = (sys.executable, str(Path(__file__).resolve().parents[1] / "benchmark"))
"""scripts/benchmark, for what is measured in a process of its own."""
