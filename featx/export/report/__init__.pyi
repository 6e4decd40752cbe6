from .run import run_report as run_report
