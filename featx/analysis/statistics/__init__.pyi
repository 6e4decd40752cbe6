from .covariance import MAX_SPECTRUM as MAX_SPECTRUM
from .covariance import gaussian_distance as gaussian_distance
from .frechet import refuse_other_values as refuse_other_values
from .moments import Moments as Moments
from .reader import Statistics as Statistics
from .run import run_stats as run_stats
from .session import FAILURES_CSV as FAILURES_CSV
