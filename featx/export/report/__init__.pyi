from .prediction_page import render_predictions as render_predictions
from .run import run_report as run_report
