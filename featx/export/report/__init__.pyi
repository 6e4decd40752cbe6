from .page import run_report as run_report
from .prediction_page import render_predictions as render_predictions
