"""Gradients in training: clipping by value or norm, and alarms that name the layer and the step."""

from featx.analysis.gradients import Alarm, GradientAlarm, GradientLog, Limits, Step, watch

__all__ = [
    "Alarm",
    "GradientAlarm",
    "GradientLog",
    "Limits",
    "Step",
    "watch",
]
