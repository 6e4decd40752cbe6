from .run import describe_export as describe_export
from .run import run_export as run_export
