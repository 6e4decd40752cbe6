from .reader import Statistics as Statistics
from .run import run_stats as run_stats
from .session import FAILURES_CSV as FAILURES_CSV
